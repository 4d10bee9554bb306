"""The server's log of requests: one line each at `-v`; refusals always.

From a client's data it logs only the path and the name of a field: no text, and no key.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger(__name__)

MAX_LINES = 10
"""Lines of one kind logged in `WINDOW_S`; later ones are only counted."""

WINDOW_S = 60.0
MAX_KINDS = 256

_HIDDEN = re.compile(r"[^A-Za-z0-9_.:/\[\]-]")


@dataclass(frozen=True)
class Served:
    """A finished request, for metrics and log.

    first_s, total_s: since the request came. reason: the finish reason, or abort or error.
    num_first: tokens that came first, together. num_kept: prompt tokens whose KV cache was reused.
    """

    reason: str
    num_prompt: int
    num_new: int
    queue_s: float
    first_s: float | None
    total_s: float
    num_first: int = 0
    num_kept: int = 0


@dataclass(slots=True)
class _Window:
    end_s: float
    num_lines: int = 0


class LineLimit:
    """Limits log lines of each kind, so that no client can flood the log."""

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}

    def allows(self, kind: str) -> bool:
        """Return True if the line may be written; otherwise count it for a later summary."""
        now_s = time.monotonic()
        if kind not in self._windows and len(self._windows) >= MAX_KINDS:
            for other in [k for k, window in self._windows.items() if now_s >= window.end_s]:
                self._end_window(other)
            if len(self._windows) >= MAX_KINDS:
                kind = "others"
        window = self._windows.get(kind)
        if window is None or now_s >= window.end_s:
            self._end_window(kind)
            window = self._windows.setdefault(kind, _Window(now_s + WINDOW_S))
        window.num_lines += 1
        if window.num_lines == MAX_LINES + 1:
            self._end_later(kind, window.end_s - now_s)
        return window.num_lines <= MAX_LINES

    def _end_later(self, kind: str, wait_s: float) -> None:
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:  # with the next line then
            return
        running.call_later(wait_s, self._end_window, kind)

    def _end_window(self, kind: str) -> None:
        """End a kind's window and log how many lines were left out."""
        window = self._windows.pop(kind, None)
        if window is not None and window.num_lines > MAX_LINES:
            num_more = window.num_lines - MAX_LINES
            _log.warning("%s: %d more in a minute.", kind, num_more)


LIMIT = LineLimit()
"""One for the process, as there is one log."""


class LimitedLog(logging.LoggerAdapter[logging.Logger]):
    """Rate-limited log of uvicorn's connections.

    An answer that a stopping server cuts off is no failure; uvicorn has a line of its own for it.
    """

    @property
    def level(self) -> int:
        return self.logger.getEffectiveLevel()

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        if not self.isEnabledFor(level):  # and so not counted either
            return
        if isinstance(kwargs.get("exc_info"), asyncio.CancelledError):
            return
        if LIMIT.allows(str(msg).strip()):
            super().log(level, msg, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> Any:
        return msg, kwargs


@dataclass(slots=True)
class _LineFacts:
    """Facts for a request's log line, collected while it is handled."""

    served: list[Served] = field(default_factory=list)
    refused: tuple[str, str | None] | None = None  # a code, and the place of a field


_LINE_FACTS: ContextVar[_LineFacts | None] = ContextVar("line_facts", default=None)


def note_served(served: Served) -> None:
    """Add a finished answer to the current request's log line."""
    line_facts = _LINE_FACTS.get()
    if line_facts is not None:
        line_facts.served.append(served)


def note_refusal(code: str, param: str | None) -> None:
    """Add a refusal, and the field at fault, to the current request's log line."""
    line_facts = _LINE_FACTS.get()
    if line_facts is not None:
        line_facts.refused = code, param


class RequestLog:
    """Outermost middleware, which writes a log line for each request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        line_facts, status = _LineFacts(), 0
        token = _LINE_FACTS.set(line_facts)

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            _LINE_FACTS.reset(token)
            _write(f"{shown(scope['method'])} {shown(scope['path'])}", status, line_facts)


def _write(asked: str, status: int, line_facts: _LineFacts) -> None:
    if status >= 400 or line_facts.refused is not None:
        code, param = line_facts.refused or ("", None)
        place = "" if param is None else f" at {shown(param)}"
        kind = f"Refused requests ({status} {code})" if code else f"Refused requests ({status})"
        if LIMIT.allows(kind):
            _log.warning("%s %d%s%s", asked, status, f": {code}" if code else "", place)
    elif not line_facts.served:
        _log.info("%s %s", asked, status or "left")
    else:
        _log.info("%s %s: %s", asked, status or "left", tokens_of(line_facts.served))


def tokens_of(served: list[Served]) -> str:
    """Describe a request's tokens: prompt, reused, new, and tokens per second."""
    num_prompt, num_kept = sum(s.num_prompt for s in served), sum(s.num_kept for s in served)
    num_new = sum(s.num_new for s in served)
    parts = [f"{num_prompt} prompt", f"{num_kept} kept", f"{num_new} new"]
    spans = [
        (s.total_s - s.first_s, s.num_new - s.num_first) for s in served if s.first_s is not None
    ]
    total_s, num_timed = max((s for s, _ in spans), default=0.0), sum(n for _, n in spans)
    if num_timed > 0 and total_s > 0:
        parts.append(f"{num_timed / total_s:.1f} tokens/s")
    ends = {s.reason for s in served} & {"abort", "error"}
    return ", ".join([*parts, *sorted(ends)])


def shown(text: str) -> str:
    """Cut a path or field name, and replace characters that could forge log lines."""
    return _HIDDEN.sub("?", text[:100])
