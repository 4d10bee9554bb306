"""Rules for reading experts ahead of their layer, where the host runs all experts.

The engine, the replay and the prediction of speed use the same rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lowtide.policies.prefetch import Gate

NEARLY_ALL = 0.9
"""Share of a layer's experts above which the next layer is expected to demand all; at most a tenth
of the reads ahead are then wasted, if the layers are alike."""

GATE_ACCURACY: Mapping[Gate, float] = {Gate.RAW: 0.75, Gate.RESIDUAL: 0.86}
"""Assumed accuracy if it was not measured: about DALI's (means of its figures for Qwen and
DeepSeek)."""

NUM_TRIED = 12
"""Passes of a trial with reading ahead, and as many without, in turn."""

NUM_KEPT = 500
"""Passes until the next trial, so that trials take a twentieth of all passes."""

WORTH = 0.98
"""Reading ahead stays on if it takes less than this share of the time without it: a smaller gain
may be chance."""


class AheadTrial:
    """Decides by trial whether the next pass reads ahead. Knows nothing of the passes' work."""

    def __init__(self) -> None:
        self.is_on = False
        self._num_kept = 0
        self._seconds: dict[bool, list[float]] = {False: [], True: []}

    def note_seconds(self, seconds: float) -> None:
        """Count a pass that waited for reads, or would have."""
        if self._num_kept:
            self._num_kept -= 1
            return
        self._seconds[self.is_on].append(seconds)
        self.is_on = not self.is_on
        if len(self._seconds[False]) == len(self._seconds[True]) == NUM_TRIED:
            without, ahead = np.median(self._seconds[False]), np.median(self._seconds[True])
            self.is_on, self._num_kept = bool(ahead < WORTH * without), NUM_KEPT
            self._seconds = {False: [], True: []}


class AheadReads(NamedTuple):
    """Outcome of a layer's reads ahead."""

    saved_s: float  # of the layer's own reads; below 0 where a read that is given up is waited for
    done_s: float  # the disk was busy with them before the layer asked
    num_useful: float  # asked for, and there in time


def read_ahead(
    num_right: float, num_wrong: float, window_s: float, read_s: float, piece_s: float = 0.0
) -> AheadReads:
    """Model reads of absent experts ahead of a layer, of which some are right and some wrong.

    window_s: from the last read of the layer before to this layer's demand.
    read_s: of an expert. piece_s: of the part after which a read can be stopped.
    """
    num_expected = num_right + num_wrong
    if not num_expected:
        return AheadReads(0.0, 0.0, 0.0)
    wrong_share, done_s = num_wrong / num_expected, min(window_s, num_expected * read_s)
    num_useful = num_right * done_s / (num_expected * read_s) if read_s else num_right
    is_given_up = done_s < num_expected * read_s
    saved_s = (1 - wrong_share) * done_s - (wrong_share * piece_s if is_given_up else 0.0)
    return AheadReads(saved_s, done_s, num_useful)
