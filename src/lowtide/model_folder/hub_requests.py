"""Requests to the hub: parts of files, asked for again where they break off, and why one failed.

Goes through huggingface-hub's own session, headers and addresses, so that HF_ENDPOINT, HF_TOKEN,
HF_HUB_DOWNLOAD_TIMEOUT and proxies mean what they mean there. Knows nothing of models.
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
"""Before each further attempt of a request that failed; bytes that came begin the row again."""
MAX_RETRY_AFTER_S = 60.0
"""A server that asks for a longer pause is not waited for."""
PIECE_BYTES = 1 << 20

_PASSING = frozenset(
    {408, 425, 429, 500, 502, 503, 504}
)  # states that another attempt may not meet
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_NEVER = Event()
_SPENT = re.compile(r"r=0;\s*t=([0-9]{1,6})")

T = TypeVar("T")


class Stopped(Exception):
    """Another caller's failure, or Ctrl-C, ended this transfer."""


class NotWhole(OSError):
    """A transfer that ended before its last byte, or had other bytes than were asked for."""


class TooManyBytes(Exception):
    """An answer of more bytes than are read."""


def file_part(url: str, start: int, stop: int, stopped: Event = _NEVER) -> Iterator[bytes]:
    """Bytes [start, stop) of a file on the hub, in pieces.

    Where the connection breaks, is silent or is refused for the moment, the rest is asked for
    again, as often as `WAITS_S` says without a byte in between. Raises `Stopped`, or what
    huggingface-hub raises; `HubError`s are made of that by `failure`.
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
    """All that the hub answers to a path of its own. Raises TooManyBytes for more than `max_bytes`,
    or what huggingface-hub raises.
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
    """What `request` returns, made again where the server says: not now.

    A server that cannot be reached is not asked again: who has no network should not wait.
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
    """The error to raise for what huggingface-hub raised about the model `name`."""
    return HubError(f"{name} could not be fetched: {_reason(error, name)}")


def brief(error: BaseException | None) -> str:
    """An error's kind and first line."""
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
    """An answer whose body can be read. Raises what huggingface-hub raises."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    with get_session().stream("GET", url, headers=headers, timeout=timeout_s) as response:
        if response.is_error:  # huggingface-hub would read all of it, which has no bound
            response.close()
        hf_raise_for_status(response)
        yield response


def _first_byte(status: int, content_range: str | None, start: int) -> int:
    """Where the bytes of an answer begin in the file. Raises NotWhole if elsewhere than asked."""
    if status != 206:
        return 0
    if content_range is None or not content_range.startswith(f"bytes {start}-"):
        raise NotWhole(f"bytes from {start} on were asked for, and {content_range} came")
    return start


def _wait(error: Exception, num_failures: int, stopped: Event) -> None:
    """Until the next attempt; raises `error` where there is to be none."""
    wait_s = _wait_s(error, num_failures)
    if wait_s is None or isinstance(error, Stopped):
        raise error
    if stopped.wait(wait_s):
        raise Stopped from error


def _wait_s(error: Exception, num_failures: int) -> float | None:
    """None: this error will be met again, or has been met often enough."""
    status = _status(error)
    if num_failures >= len(WAITS_S) or (status is not None and status not in _PASSING):
        return None
    asked_s = _retry_after_s(error)
    return None if asked_s > MAX_RETRY_AFTER_S else max(WAITS_S[num_failures], asked_s)


def _status(error: Exception) -> int | None:
    """The HTTP status that an error stands for; None if there was no answer."""
    from huggingface_hub.errors import HfHubHTTPError

    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def _retry_after_s(error: Exception) -> float:
    """Seconds that the server asked to wait; 0 where it did not say.

    From Retry-After (RFC 9110, 10.2.3; a date counts as nothing said) or the hub's own
    `RateLimit: "api";r=0;t=55`, which counts once nothing remains.
    """
    from huggingface_hub.errors import HfHubHTTPError

    if not isinstance(error, HfHubHTTPError):
        return 0.0
    headers = error.response.headers
    text = headers.get("Retry-After", "")
    limit = _SPENT.search(headers.get("RateLimit", ""))
    return float(text) if text.isdecimal() else float(limit[1]) if limit else 0.0


def _reason(error: Exception, name: str) -> str:
    """What went wrong and the way out."""
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
        f"--offline a whole copy of {name} in the cache is used; or give a folder."
    )


def _refusal(error: Exception, endpoint: str) -> str:
    """What the hub's status says and the way out; nothing of another status, or of none."""
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
