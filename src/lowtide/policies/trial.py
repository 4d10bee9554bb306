"""Times two policies against each other, for these passes on this machine.

Beside a device, twenty passes under each decided better than any cost model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

NUM_TRIED = 20
"""Passes under each policy in a trial."""

NUM_KEPT = 500
"""Passes under the faster policy until the next trial."""

_MIN_COMPARED = 5
"""Passes of one size needed under each policy before they are compared."""


class Verdict(NamedTuple):
    """The policy that was chosen, and the medians of comparable passes if there were enough."""

    faster: str
    slower: str
    faster_s: float | None = None
    slower_s: float | None = None

    def __str__(self) -> str:
        if self.faster_s is None or self.slower_s is None:
            return f"{self.faster}: too few passes were comparable with those of {self.slower}"
        return (
            f"{self.faster} took {1e3 * self.faster_s:.3g} ms a pass, "
            f"{self.slower} {1e3 * self.slower_s:.3g}; tried again after {NUM_KEPT} passes"
        )


class PolicyTrial:
    """Names the policy for the next pass. Knows nothing of the work of policies and passes."""

    def __init__(self, first: str, second: str) -> None:
        """Begin a trial; `first` is chosen if the two cannot be compared."""
        self.current = first
        self.verdict: Verdict | None = None
        self._default, self._other = first, second
        self._num_passes = 0  # under the current policy, since it was chosen
        self._seconds: dict[str, dict[int, list[float]]] = {}

    def note_pass(self, num_rows: int, seconds: float) -> str:
        """Count a pass under the current policy; return the policy of the next one."""
        self._num_passes += 1
        if self.verdict is not None:
            if self._num_passes >= NUM_KEPT:
                self.verdict, self._num_passes, self._seconds = None, 0, {}
            return self.current
        # Prompts and answers differ in rows: only passes of like size are compared.
        by_size = self._seconds.setdefault(self.current, defaultdict(list))
        by_size[num_rows.bit_length()].append(seconds)
        if self._num_passes >= NUM_TRIED:
            self._num_passes = 0
            if len(self._seconds) == 2:
                self.verdict = self._compare()
                self.current = self.verdict.faster
            else:
                self.current = self._other if self.current == self._default else self._default
        return self.current

    def _compare(self) -> Verdict:
        one, two = (self._seconds[name] for name in (self._default, self._other))
        size = max({**one, **two}, key=lambda size: _num_common(one, two, size))
        if _num_common(one, two, size) < _MIN_COMPARED:
            return Verdict(self._default, self._other)
        timed: Sequence[tuple[float, str]] = [
            (float(np.median(one[size])), self._default),
            (float(np.median(two[size])), self._other),
        ]
        (faster_s, faster), (slower_s, slower) = sorted(timed, key=lambda pair: pair[0])
        return Verdict(faster, slower, faster_s, slower_s)


def _num_common(one: dict[int, list[float]], two: dict[int, list[float]], size: int) -> int:
    return min(len(one.get(size, ())), len(two.get(size, ())))
