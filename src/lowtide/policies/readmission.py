"""Readmission: replaced experts that are read all the same, so that residents keep adapting.

Without a device only experts that run are read, and a replaced one does not. Were all absent ones
replaced for ever, the model would be pruned to the first residents, and look fast.
"""

from __future__ import annotations

import numpy as np

from lowtide.core import NO_EXPERTS, Facts, IntArray, Moves

EVERY = 8
"""Passes in which a layer may have one such read: an eighth of a read per layer and pass is little
beside what substitution saves, and a layer's residents are new after a few hundred tokens."""


class Readmission:
    """Counts each layer's passes; layers take turns, so that no pass reads for all of them."""

    def __init__(self, num_layers: int) -> None:
        self._num_passes = np.arange(num_layers) % EVERY

    def choose(self, facts: Facts, run: Facts | None, moves: Moves) -> IntArray:
        """Choose an expert to admit when it is the layer's turn, else none.

        It is the one with most tokens among those that the router asked for, that the placement
        admits and that do not run.
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
