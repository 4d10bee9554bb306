"""Time for prompts beside answers: half of it at most, where they are of different callers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager


class PromptShare:
    """Chooses passes without prompts, so that one caller's long prompt delays no other's answers.

    Requests of one call delay only each other: their passes are the same as without a clock, so a
    batch's words never depend on time.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._owed_s = 0.0  # to passes without prompts
        self._is_contended = False

    def holds_back(self, prompts: Collection[int], answers: Collection[int]) -> bool:
        """Return True if the next pass should have no prompt rows.

        prompts, answers: the callers of requests that have a prompt left, and of those that write.
        """
        self._is_contended = bool(prompts and answers) and len({*prompts, *answers}) > 1
        if not self._is_contended:
            self._owed_s = 0.0
        return self._owed_s > 0

    @contextmanager
    def measured(self, has_prompts: bool) -> Iterator[None]:
        """Around a pass."""
        if not self._is_contended:
            yield
            return
        start_s = self._clock()
        yield
        taken_s = self._clock() - start_s
        self._owed_s = max(0.0, self._owed_s + (taken_s if has_prompts else -taken_s))
