"""Progress of loading or of many answers, as one line that overwrites itself."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import IO, Self

from lowtide.config import format_size
from lowtide.decode.request import Committed, Event, Finished

FIRST_AFTER_S = 0.5
"""Work that ends sooner shows no line."""

MIN_FRAME_S = 0.1


class OneLine:
    """A line on `out` that overwrites itself, shown after `FIRST_AFTER_S`.

    It needs only carriage returns, so notebooks show it, too. At the end it is erased.
    """

    def __init__(self, out: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._clock = clock
        self._start_s = clock()
        self._next_s = self._start_s + FIRST_AFTER_S
        self._width = 0  # characters on the line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:
            self._write("")
            self._out.write("\r")
            self._out.flush()

    def _show(self, line: Callable[[float], str]) -> None:
        """Write `line(elapsed seconds)` if a frame is due."""
        now_s = self._clock()
        if now_s >= self._next_s:
            self._next_s = now_s + MIN_FRAME_S
            self._write(line(now_s - self._start_s))

    def _write(self, line: str) -> None:
        self._out.write("\r" + line.ljust(self._width))
        self._out.flush()
        self._width = len(line)


class ProgressLine(OneLine):
    """Line of answers done, tokens, speed and time left; called with every event."""

    def __init__(
        self, num_answers: int, out: IO[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(out, clock)
        self._num_answers = num_answers
        self._num_done = self._num_tokens = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Committed):
            self._num_tokens += len(event.tokens)
        elif isinstance(event, Finished):
            self._num_done += 1
        self._show(self._line)

    def _line(self, elapsed_s: float) -> str:
        speed = self._num_tokens / elapsed_s
        line = f"{self._num_done}/{self._num_answers} answers, {self._num_tokens} tokens"
        line += f", {speed:.1f} tokens/s"
        if self._num_done:
            left_s = elapsed_s * (self._num_answers - self._num_done) / self._num_done
            line += f", {left_s:.0f} s left"
        return line


class LoadingLine(OneLine):
    """Line of bytes fetched or read; called like `Progress`."""

    def __call__(self, what: str, done_bytes: int, total_bytes: int) -> None:
        if ": " in what:
            self._show(lambda _: what)
            return
        share = done_bytes / max(total_bytes, 1)
        done, total = format_size(done_bytes), format_size(total_bytes)
        self._show(lambda _: f"{what}: {done} of {total}, {share:.0%}")


def is_watched() -> bool:
    """Return True if standard error is a terminal or a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules
