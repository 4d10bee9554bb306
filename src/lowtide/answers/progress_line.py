"""How far many answers are, or a model that is loaded, as one line that is written over itself."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import IO, Self

from lowtide.config import format_size
from lowtide.decode.request import Committed, Event, Finished

FIRST_AFTER_S = 0.5
"""What is done sooner shows nothing."""

MIN_FRAME_S = 0.1


class OneLine:
    """A line on `out` that is written over itself, from `FIRST_AFTER_S` on.

    A carriage return is all that it asks of a terminal, so that a notebook shows it, too. What it
    wrote is gone at the end.
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
        """What `line` makes of the seconds so far, if it is time."""
        now_s = self._clock()
        if now_s >= self._next_s:
            self._next_s = now_s + MIN_FRAME_S
            self._write(line(now_s - self._start_s))

    def _write(self, line: str) -> None:
        self._out.write("\r" + line.ljust(self._width))
        self._out.flush()
        self._width = len(line)


class ProgressLine(OneLine):
    """Answers done of all, tokens, speed and the time left. Told of every event."""

    def __init__(
        self, num_answers: int, out: IO[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(out, clock)
        self._num_answers = num_answers
        self._num_done = self._num_tokens = 0

    def __call__(self, event: Event) -> None:
        """Counts an event, and shows the line if it is time."""
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
    """What is fetched or read of a model, and how much of it. Called as `Progress` is."""

    def __call__(self, what: str, done_bytes: int, total_bytes: int) -> None:
        if ": " in what:
            self._show(lambda _: what)
            return
        share = done_bytes / max(total_bytes, 1)
        done, total = format_size(done_bytes), format_size(total_bytes)
        self._show(lambda _: f"{what}: {done} of {total}, {share:.0%}")


def is_watched() -> bool:
    """Whether standard error is shown as it is written: on a terminal, or in a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules
