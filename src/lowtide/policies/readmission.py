"""Readmission: reads some replaced experts after all, so that residents keep adapting.

Without a device only experts that run are read, and replaced ones do not run. If all absent experts
were always replaced, the model would in effect be pruned to its first residents, and look fast.
"""

from __future__ import annotations

import numpy as np

from lowtide.core import NO_EXPERTS, Facts, IntArray, Moves

EVERY = 8
"""A layer has one such read in this many passes. That is little beside the savings of substitution,
and still renews a layer's residents within a few hundred tokens."""


class Readmission:
    """Counts each layer's passes; layers take turns, so that no pass reads for all of them."""

    def __init__(self, num_layers: int) -> None:
        self._num_passes = np.arange(num_layers) % EVERY

    def choose(self, facts: Facts, run: Facts | None, moves: Moves) -> IntArray:
        """Return an expert to admit if it is the layer's turn, else none.

        It is the demanded expert with most tokens that the placement admits and that does not run.
        """
        self._num_passes[facts.layer] += 1
        if run is None or self._num_passes[facts.layer] % EVERY:
            return NO_EXPERTS
        demand = facts.demand
        is_left = np.isin(demand.experts, moves.admit)
        is_left &= ~np.isin(demand.experts, run.demand.experts)
        if not is_left.any():
            return NO_EXPERTS
        most = np.argmax(np.where(is_left, demand.num_tokens, 0))
        return demand.experts[most : most + 1]
