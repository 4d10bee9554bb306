"""`ServeSettings`: address, access and limits of `lowtide serve`.

Imports neither torch nor the `serve` extra, since the command line makes its flags from it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from lowtide.errors import UsageError
from lowtide.option import Group, check_options, option

_serve = partial(option, Group.SERVE)


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Options of a server; each field's help text is its documentation."""

    host: str = _serve("Address to listen on.", "127.0.0.1", is_common=True)
    port: int = _serve("Port to listen on; 0 picks a free one.", 8000, high=65535, is_common=True)
    api_key: str | None = _serve("Key that requests must carry.", is_common=True)
    auth: bool = _serve("Require a key if other machines can reach the server.", True)
    served_name: str | None = _serve("Model name shown to clients.", is_common=True)
    max_requests: int = _serve("Most requests running and waiting at once.", 64, low=1)
    max_queued_tokens: int | None = _serve(
        "Most prompt tokens waiting; default: eight times the context.", low=1
    )
    request_timeout_s: float = _serve(
        "Time limit of an answer in seconds, including waiting.",
        3600.0,
        name="request_timeout",
        low=1,
        high=604800,
    )
    allowed_hosts: str | Sequence[str] | None = _serve(
        "Additional name to accept in the Host header.", name="allowed_host"
    )
    allowed_origins: str | Sequence[str] | None = _serve(
        "Origin of web pages that may ask, such as http://localhost:3000.",
        name="allowed_origin",
    )

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("allowed_hosts", "allowed_origins"):
            given = getattr(self, name) or ()
            listed = (given,) if isinstance(given, str) else tuple(given)
            object.__setattr__(self, name, tuple(each.lower() for each in listed))
        key = self.api_key
        if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key):
            raise UsageError(
                "`api_key` must be printable ASCII without spaces around it: a header carries it."
            )
        if self.auth and key is None and not self.is_local:
            raise UsageError(
                f"`host` {self.host!r} can be reached from other machines, and there is no key: "
                "give --api-key (or LOWTIDE_API_KEY), or --no-auth to serve all who ask."
            )

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the server."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Return True if a name or an address is this machine's loopback."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")
