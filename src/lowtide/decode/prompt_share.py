"""Time for prompts beside answers: half of it at most, where they are of different callers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager


class PromptShare:
    """Says which passes are without prompts, so that a long prompt of one caller does not hold up
    the answers of another.

    The requests of one call hold up each other only: their passes are what they would be without a
    clock, so the words of a batch never depend on time.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._owed_s = 0.0  # to passes without prompts
        self._is_contended = False

    def holds_back(self, prompts: Collection[int], answers: Collection[int]) -> bool:
        """Whether the next pass is one without prompts. prompts, answers: the callers of those
        that have a prompt left, and of those that write.
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
