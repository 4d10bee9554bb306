"""Whether compiled passes read ahead, by what passes take with it and without."""

from __future__ import annotations

from statistics import median

NUM_TRIED = 12
"""Passes of a trial with reading ahead, and as many without, in turn."""

NUM_KEPT = 500
"""Passes until the next trial, which so takes a twentieth of all passes."""

WORTH = 0.98
"""Reading ahead stays on below this share of the time without it: a smaller gain may be chance."""


class AheadTrial:
    """Decides whether the next pass reads ahead. Knows nothing of what passes do."""

    def __init__(self) -> None:
        self.is_on = False
        self._num_kept = 0
        self._seconds: dict[bool, list[float]] = {False: [], True: []}

    def took(self, seconds: float) -> None:
        """Told of a pass that waited for reads, or would have."""
        if self._num_kept:
            self._num_kept -= 1
            return
        self._seconds[self.is_on].append(seconds)
        self.is_on = not self.is_on
        if len(self._seconds[False]) == len(self._seconds[True]) == NUM_TRIED:
            without, ahead = median(self._seconds[False]), median(self._seconds[True])
            self.is_on, self._num_kept = ahead < WORTH * without, NUM_KEPT
            self._seconds = {False: [], True: []}
