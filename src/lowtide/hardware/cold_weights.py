"""Weights that are in no cache, as in a model larger than the caches.

A set of them is used in turn, so large that each has left the caches before its next turn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lowtide.experts.layout import SlotLayout
from lowtide.experts.slots import ExpertSlots
from lowtide.memory.arena import Arena
from lowtide.threads.executor import Executor

_BLOCK_ELEMENTS = 1 << 20
_CACHE_FOLDER = Path("/sys/devices/system/cpu/cpu0/cache")


def cold_bytes() -> int:
    """Return a size that cannot stay in the caches: half more than the last level holds."""
    return max(256 << 20, last_level_cache_bytes() * 3 // 2)


def last_level_cache_bytes(folder: Path = _CACHE_FOLDER) -> int:
    """Return the first core's largest cache, as Linux reports it, or 0."""
    sizes = [path.read_text().strip() for path in folder.glob("index*/size")]
    return max((int(size[:-1]) << 10 for size in sizes if size.endswith("K")), default=0)


class ColdWeights:
    """Random experts of the layer with the largest in host memory, handed out in turn."""

    def __init__(
        self,
        layout: SlotLayout,
        executor: Executor,
        least_bytes: int,
        make_arena: Callable[[int], Arena] = Arena,
    ) -> None:
        """Make at least `least_bytes` of weights, and more than one expert per thread.

        make_arena: makes other host memory than an Arena if the device needs it. Raises PlanError
        if the system refuses the memory.
        """
        self.num_slots = num_cold_experts(layout, executor.num_threads, least_bytes)
        self.arena = make_arena(self.num_slots * layout.num_bytes)
        self.slots = ExpertSlots(self.arena, layout)
        self._next = 0
        self.layer = layout.layers.index(layout.largest)  # whose experts they are, of no other
        _, hidden_size = layout.largest.parts[0].shape
        self._fill(hidden_size**-0.5, executor)

    def next_slot(self) -> int:
        slot = self._next
        self._next = (slot + 1) % self.num_slots
        return slot

    def _fill(self, deviation: float, executor: Executor) -> None:
        # A block is drawn and repeated: random numbers cost more than the memory they go to.
        first, dtype = self.slots.image(0), self.slots.layout.dtype
        generator = torch.Generator().manual_seed(0)
        block = torch.empty(_BLOCK_ELEMENTS, dtype=dtype)
        block.normal_(std=deviation, generator=generator)
        for piece in torch.split(first.view(dtype), _BLOCK_ELEMENTS):
            piece.copy_(block[: len(piece)])
        self.slots.layout.largest.mark_largest(first)
        copies = [partial(_copy, first, self.slots.image(i)) for i in range(1, self.num_slots)]
        executor.run(copies)


def num_cold_experts(layout: SlotLayout, num_threads: int, least_bytes: int) -> int:
    """Return the number of experts in `ColdWeights`."""
    return max(num_threads + 1, -(-least_bytes // layout.num_bytes))


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)
