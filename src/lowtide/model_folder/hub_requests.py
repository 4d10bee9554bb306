"""Requests to the hub: file parts with retries, and reasons of failures.

Uses huggingface-hub's session, headers and addresses, so that HF_ENDPOINT, HF_TOKEN,
HF_HUB_DOWNLOAD_TIMEOUT and proxies work as usual. Knows nothing of models.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any, TypeVar

from lowtide.errors import HubError

WAITS_S = (1.0, 2.0, 4.0, 8.0)
"""Pauses before further attempts of a failed request; received bytes restart the sequence."""
MAX_RETRY_AFTER_S = 60.0
"""Longest pause that a server may ask for; longer ones are not waited for."""
PIECE_BYTES = 1 << 20

_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})  # statuses that may pass
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_NEVER = Event()
_SPENT = re.compile(r"r=0;\s*t=([0-9]{1,6})")

T = TypeVar("T")


class Stopped(Exception):
    """Raised in a transfer that another one's failure or Ctrl-C ended."""


class NotWhole(OSError):
    """A transfer that ended early or had other bytes than requested."""


class TooManyBytes(Exception):
    """An answer with more bytes than are read."""


def file_part(url: str, start: int, stop: int, stopped: Event = _NEVER) -> Iterator[bytes]:
    """Yield bytes [start, stop) of a file on the hub, in pieces.

    If the connection breaks, stalls or is refused for the moment, the rest is requested again, up
    to `WAITS_S` attempts without a byte. Raises `Stopped`, or huggingface-hub's errors, which
    `failure` turns into `HubError`.
    """
    num_failures = 0
    while start < stop:
        try:
            for piece in _pieces(url, start, stop):
                start, num_failures = start + len(piece), 0
                yield piece
                if stopped.is_set():
                    raise Stopped
            if start < stop:
                raise NotWhole(f"the transfer ended {stop - start} bytes early")
        # The HTTP library below huggingface-hub, and so its errors, differ by version.
        except Exception as error:
            _wait(error, num_failures, stopped)
            num_failures += 1


def answer_to(path: str, max_bytes: int) -> bytes:
    """Return the hub's whole answer to a path.

    Raises TooManyBytes for more than `max_bytes`, or huggingface-hub's errors.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers

    url, answer = f"{constants.ENDPOINT}/{path}", bytearray()
    with _response(url, build_hf_headers(), constants.HF_HUB_ETAG_TIMEOUT) as response:
        for piece in response.iter_bytes(PIECE_BYTES):
            answer += piece
            if len(answer) > max_bytes:
                raise TooManyBytes(f"the hub's answer has more than {max_bytes} bytes")
    return bytes(answer)


def asked(request: Callable[[], T]) -> T:
    """Call `request`, again if the server asks to retry later.

    An unreachable server is not retried: without a network there is nothing to wait for.
    """
    num_failures = 0
    while True:
        try:
            return request()
        except Exception as error:
            if _status(error) is None:
                raise
            _wait(error, num_failures, _NEVER)
            num_failures += 1


def failure(name: str, error: Exception) -> HubError:
    """Make the error for what huggingface-hub raised about the model `name`."""
    return HubError(f"{name} could not be fetched: {_reason(error, name)}")


def brief(error: BaseException | None) -> str:
    """Return an error's type and first line."""
    text = f"{type(error).__name__}: {error}".strip()
    return text.splitlines()[0][:300].rstrip(" .:")


def _pieces(url: str, start: int, stop: int) -> Iterator[bytes]:
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers

    # Compressed, a part's bytes would not be the file's.
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    headers["Range"] = f"bytes={start}-{stop - 1}"
    with _response(url, headers, constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
        position = _first_byte(response.status_code, response.headers.get("Content-Range"), start)
        for piece in response.iter_bytes(PIECE_BYTES):
            wanted = piece[max(0, start - position) : max(0, stop - position)]
            position += len(piece)
            if wanted:
                yield wanted
            if position >= stop:  # a server that ignores ranges would send the whole file
                return


@contextmanager
def _response(url: str, headers: dict[str, str], timeout_s: float) -> Iterator[Any]:
    """Yield a readable answer. Raises huggingface-hub's errors."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    with get_session().stream("GET", url, headers=headers, timeout=timeout_s) as response:
        if response.is_error:  # huggingface-hub would read all of it, without a bound
            response.close()
        hf_raise_for_status(response)
        yield response


def _first_byte(status: int, content_range: str | None, start: int) -> int:
    """Return the start in the file of an answer's bytes.

    Raises NotWhole if it is not as requested.
    """
    if status != 206:
        return 0
    if content_range is None or not content_range.startswith(f"bytes {start}-"):
        raise NotWhole(f"bytes from {start} on were asked for, and {content_range} came")
    return start


def _wait(error: Exception, num_failures: int, stopped: Event) -> None:
    """Wait for the next attempt; raises `error` if there is none."""
    wait_s = _wait_s(error, num_failures)
    if wait_s is None or isinstance(error, Stopped):
        raise error
    if stopped.wait(wait_s):
        raise Stopped from error


def _wait_s(error: Exception, num_failures: int) -> float | None:
    """Return the pause before the next attempt; None for a permanent or repeated error."""
    status = _status(error)
    if num_failures >= len(WAITS_S) or (status is not None and status not in _PASSING):
        return None
    asked_s = _retry_after_s(error)
    return None if asked_s > MAX_RETRY_AFTER_S else max(WAITS_S[num_failures], asked_s)


def _status(error: Exception) -> int | None:
    """Return an error's HTTP status, or None if there was no answer."""
    from huggingface_hub.errors import HfHubHTTPError

    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def _retry_after_s(error: Exception) -> float:
    """Return the seconds that the server asked to wait, or 0.

    From Retry-After (RFC 9110, 10.2.3; dates are ignored) or the hub's own `RateLimit:
    "api";r=0;t=55`, which counts once nothing remains.
    """
    from huggingface_hub.errors import HfHubHTTPError

    if not isinstance(error, HfHubHTTPError):
        return 0.0
    headers = error.response.headers
    text = headers.get("Retry-After", "")
    limit = _SPENT.search(headers.get("RateLimit", ""))
    return float(text) if text.isdecimal() else float(limit[1]) if limit else 0.0


def _reason(error: Exception, name: str) -> str:
    """Describe the failure and the way out."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return "its owner gives access on request; ask for it on the hub, then set HF_TOKEN."
    if isinstance(error, errors.RevisionNotFoundError):
        return "the hub has the model but not this revision; look for its branches and tags there."
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has no such model, or it is private (then set HF_TOKEN)."
    if isinstance(error, OSError) and error.errno in _FULL_DISK:
        return (
            f"the disk is full ({error.strerror}). Make room, or set HF_HOME to a folder on a "
            "larger disk; what was fetched so far is kept."
        )
    if isinstance(error, OSError) and error.filename is not None:
        return (
            f"{error.filename}: {error.strerror}. Make it yours, or set HF_HOME to a folder of "
            "yours; what was fetched so far is kept."
        )
    if isinstance(error, TooManyBytes):
        return (
            f"{error}, a list of well over 100,000 files. Fetch those that you want with "
            "huggingface-hub (hf download --include) and give their folder."
        )
    return _refusal(error, constants.ENDPOINT) or (
        f"{brief(error)}. Check the network and try again (what was fetched so far is kept); with "
        f"`offline` a whole copy of {name} in the cache is used; or give a folder."
    )


def _refusal(error: Exception, endpoint: str) -> str:
    """Describe the hub's status and the way out; "" for other statuses or none."""
    status = _status(error)
    if status == 401:
        return f"{endpoint} wants a login (401); set HF_TOKEN to a valid token of yours."
    if status == 403:
        return f"{endpoint} forbids it (403); HF_TOKEN needs the right to read this model."
    if status == 404:
        return f"{endpoint} has no such model or file (404); check the id and HF_ENDPOINT."
    if status == 429:
        after_s = _retry_after_s(error)
        when = f"in {after_s:.0f} s" if after_s else "later"
        return (
            f"{endpoint} has had too many requests from here (429); try again {when}, what was "
            "fetched so far is kept. With HF_TOKEN set more are allowed."
        )
    return ""
