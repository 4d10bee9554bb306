"""Whether compiled passes read ahead, by what passes take with it and without."""

from __future__ import annotations

from statistics import median

NUM_TRIED = 12
"""Passes of either kind in a trial, in turn."""

NUM_KEPT = 500
"""Passes until the next trial: it takes a twentieth of all."""

WORTH = 0.98
"""Of the time without: what is gained by less may be chance."""


class AheadTrial:
    """Decides for the next pass. Knows nothing of what passes do."""

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
