"""Lending memory to expert slots: which experts come and go with it.

A KV cache uses its memory only as its sequences grow. Meanwhile the rest holds experts; the coldest
leave when the memory is needed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lowtide.core import BoolArray, FloatArray, IntArray

_FORGET = 1 / 16
"""Weight of the newest step in an expert's use, which averages about sixteen steps."""

MOVE_READS = 1.5
"""Cost of making a slot and taking it away again, in reads of an expert: new pages, a copy within
memory, and another read when the expert comes back (docs/log)."""


class ExpertUse:
    """Recent demand of each expert, as shares of steps: `mean` [layers, experts]."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.mean: FloatArray = np.zeros((num_layers, num_experts))

    def saw(self, hits: IntArray) -> None:
        """Record a step's demand in all layers: hits [layers, experts]."""
        self.mean *= 1 - _FORGET
        self.mean += _FORGET * (hits > 0)


class Shrunk(NamedTuple):
    """Reduced capacity, and the experts to evict."""

    capacity: IntArray  # [num_layers]
    evict: list[tuple[int, int]]  # (layer, expert)


def shrunk(capacity: IntArray, is_resident: BoolArray, use: FloatArray, count: int) -> Shrunk:
    """Reduce the room by `count` residents over all layers.

    Empty room goes first, then the coldest residents; among equals lower layers and ids first.
    capacity [layers]; is_resident, use [layers, experts].
    """
    layers, experts = is_resident.nonzero()
    num_leaving = max(0, len(layers) - int(capacity.sum()) + count)
    coldest = use[layers, experts].argsort(kind="stable")[:num_leaving]
    evict = list(zip(layers[coldest].tolist(), experts[coldest].tolist(), strict=True))
    left = capacity.copy()
    # By layer. Some presets divide their room otherwise: a layer may have more than it was given.
    spare = left - is_resident.sum(axis=1) + np.bincount(layers[coldest], minlength=len(left))
    for _ in range(count):
        layer = np.where(left > 0, spare, -is_resident.size).argmax()
        left[layer] -= 1
        spare[layer] -= 1
    return Shrunk(left, evict)


def grown(capacity: IntArray, is_resident: BoolArray, use: FloatArray, count: int) -> IntArray:
    """Add room for `count` residents, up to the number of experts.

    It goes to the layers whose absent experts are used most. Arguments as for `shrunk`.
    """
    more = capacity.copy()
    worth = np.where(is_resident, -1.0, use)
    layers, _ = np.unravel_index((-worth).argsort(axis=None, kind="stable"), worth.shape)
    for layer in layers.tolist():
        if count and more[layer] < is_resident.shape[1]:
            more[layer] += 1
            count -= 1
    return more


def worth_lending(num_free_bytes: int, growth_bytes: float, absent_use: float) -> int:
    """Return the number of free bytes to lend to expert slots rather than keep for sequences.

    growth_bytes: taken by sequences per step. absent_use: share of steps in which one more resident
    saves a read. A slot taken back after n steps has saved `n * absent_use` reads and must have
    saved `MOVE_READS`, so the memory that sequences will need by then stays free.
    """
    if absent_use <= 0.0:
        return 0
    kept_bytes = growth_bytes * MOVE_READS / absent_use
    return max(0, int(num_free_bytes - kept_bytes))
