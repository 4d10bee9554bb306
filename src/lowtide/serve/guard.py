"""Access control: keys, Host and Origin headers, sizes and times of bodies.

Web pages in a browser on this machine can reach its loopback addresses. DNS rebinding shows in the
Host header, a request from another site in the Origin header.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lowtide.serve.errors import QueueFull, Refusal, UnclearLength, response_of
from lowtide.serve.settings import ServeSettings, is_loopback

MAX_BODY_BYTES = 8 << 20
MAX_BODIES_BYTES = 32 << 20
"""Bytes of all bodies of requests under way; parsed and rendered they take ten times as many."""

UNCOUNTED_BYTES = 256 << 10
"""Bytes of each body that do not count there, so that no client can shut ordinary requests out."""

BODY_TIMEOUT_S = 60.0
"""Time limit for a whole body."""

MAX_HEADER_BYTES = 64 << 10

WATCHED_PATHS = ("/health", "/ready")
"""Paths that load balancers poll."""

OPEN_PATHS = ("/health",)
"""Paths of every server that need no key, so that a process monitor needs none."""


class Guard:
    """Middleware that refuses requests before their bodies are parsed. Knows nothing of models.

    open_paths: further paths that need no key.
    bounds_sum: bodies are also bounded together.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServeSettings,
        open_paths: Collection[str] = (),
        bounds_sum: bool = True,
    ) -> None:
        self._app = app
        self._open_paths = frozenset((*OPEN_PATHS, *open_paths))
        self._settings = settings
        self._bodies = _Bodies(bounds_sum)
        self._key = None if settings.api_key is None else settings.api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive, self._bodies)
        try:
            headers = Headers(scope=scope)
            self._check(scope, headers)
            body.expect(int(headers.get("content-length", "0")))
            await self._app(scope, body, send)
        except (Refusal, HTTPException) as error:
            await response_of(error, scope["path"])(scope, receive, send)
        finally:
            body.forget()

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raise Refusal for a request that is not admitted."""
        _check_head(scope, headers)
        path = scope["path"]
        # HAProxy asks so; a browser, whose pages are to be kept out, always names the host.
        is_old = scope.get("http_version") == "1.0" and "host" not in headers
        if not (is_old and path in WATCHED_PATHS):
            self._check_host(headers)
        self._check_origin(headers)
        if self._key is not None and path not in self._open_paths and scope["method"] != "OPTIONS":
            self._check_key(self._key, headers)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            raise _too_large()

    def _check_host(self, headers: Headers) -> None:
        hosts = headers.getlist("host")
        name = host_name(hosts[0]) if len(hosts) == 1 else None
        if name is None or not self._is_known(name):
            raise Refusal(
                f"The Host header names {name!r:.80}, which this server does not answer for; "
                "--allowed-host lets it.",
                403,
                "permission_error",
            )

    def _is_known(self, name: str) -> bool:
        """Return True if a Host header may name it.

        Any IP address may: DNS rebinding needs a name.
        """
        if is_loopback(name) or name in (
            self._settings.host,
            *(self._settings.allowed_hosts or ()),
        ):
            return True
        with suppress(ValueError):
            ipaddress.ip_address(name)
            return True
        return False

    def _check_origin(self, headers: Headers) -> None:
        origins = headers.getlist("origin")
        if not origins:
            return
        origin = origins[0].lower()
        is_own = origin.partition("://")[2] == headers.get("host", "").lower()
        allowed = self._settings.allowed_origins or ()
        if len(origins) > 1 or not (is_own or origin in allowed):
            raise Refusal(
                f"Pages of {origin!r:.80} may not ask this server; --allowed-origin lets them.",
                403,
                "permission_error",
            )

    def _check_key(self, key: bytes, headers: Headers) -> None:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not hmac.compare_digest(given.encode(), key):
            raise Refusal(
                "This server needs its key: Authorization: Bearer KEY, or x-api-key.",
                401,
                "authentication_error",
                code="invalid_api_key",
            )


def _check_head(scope: Scope, headers: Headers) -> None:
    """Raise Refusal for headers that are too large or state the body's length twice."""
    sizes = (len(name) + len(value) + 4 for name, value in headers.raw)
    path = scope.get("raw_path") or b""
    query = scope.get("query_string", b"")
    num_bytes = sum(sizes) + len(scope["method"]) + len(path) + len(query)
    if num_bytes > MAX_HEADER_BYTES:
        raise Refusal(f"The headers are above {MAX_HEADER_BYTES} bytes.", 431)
    if "content-length" in headers and "transfer-encoding" in headers:
        raise UnclearLength


@dataclass(slots=True)
class _Bodies:
    """Sum over the bodies of all requests under way."""

    is_bounded: bool
    num_bytes: int = 0


class _Body:
    """Receives a request's body within a size and a time limit."""

    def __init__(self, receive: Receive, bodies: _Bodies) -> None:
        self._receive, self._bodies = receive, bodies
        self._num_counted = 0
        self._end_s = time.monotonic() + BODY_TIMEOUT_S
        self._num_bytes = 0
        self._is_whole = False

    async def __call__(self) -> Message:
        if self._is_whole:
            return await self._receive()
        try:
            async with asyncio.timeout(self._end_s - time.monotonic()):
                message = await self._receive()
        except TimeoutError:
            detail = f"The body did not come within {BODY_TIMEOUT_S:g} s."
            raise HTTPException(408, detail) from None
        self._num_bytes += len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        if self._num_bytes > MAX_BODY_BYTES:
            raise _too_large()
        self.expect(self._num_bytes)
        return message

    def expect(self, num_bytes: int) -> None:
        """Add a body of this length to those of all requests. Raise QueueFull for too many bytes.

        The length that a request states counts at once: so of many that come together, some are
        let in, and not all refused halfway.
        """
        num_more = max(0, num_bytes - UNCOUNTED_BYTES - self._num_counted)
        num_there = self._bodies.num_bytes
        is_above = num_there + num_more > MAX_BODIES_BYTES and self._bodies.is_bounded
        if num_more and is_above:
            raise QueueFull(
                f"The server is busy: large requests of {num_there} bytes are under way, and with "
                f"this one they are above {MAX_BODIES_BYTES}. Ask again in 10 s.",
                10,
            )
        self._num_counted += num_more
        self._bodies.num_bytes += num_more

    def forget(self) -> None:
        """Count the body no more: its request has ended."""
        self._bodies.num_bytes -= self._num_counted
        self._num_counted = 0


def host_name(header: str) -> str | None:
    """Return the name or address in a Host header, in lower case; None if it is malformed."""
    with suppress(ValueError):
        parts = urlsplit(f"//{header}")
        _ = parts.port  # a ValueError for what is not a number
        if parts.netloc == header and "@" not in header:
            return parts.hostname
    return None


def _too_large() -> HTTPException:
    # An HTTPException, since FastAPI replaces any other error raised while it reads a body.
    return HTTPException(413, f"The body is above {MAX_BODY_BYTES} bytes.")
