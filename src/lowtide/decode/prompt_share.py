"""Shares time between prompts and answers of different callers: at most half for prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager


class PromptShare:
    """Chooses passes without prompts, so that a long prompt does not delay other callers' answers.

    Requests of one call share passes without a clock, so a batch's words never depend on time.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._owed_s = 0.0  # to passes without prompts
        self._is_contended = False

    def holds_back(self, prompts: Collection[int], answers: Collection[int]) -> bool:
        """Return True if the next pass should have no prompt rows.

        prompts: callers of requests with a prompt left. answers: callers of requests that write.
        """
        self._is_contended = bool(prompts and answers) and len({*prompts, *answers}) > 1
        if not self._is_contended:
            self._owed_s = 0.0
        return self._owed_s > 0

    @contextmanager
    def measured(self, has_prompts: bool) -> Iterator[None]:
        """Measure the pass in this context."""
        if not self._is_contended:
            yield
            return
        start_s = self._clock()
        yield
        taken_s = self._clock() - start_s
        self._owed_s = max(0.0, self._owed_s + (taken_s if has_prompts else -taken_s))
