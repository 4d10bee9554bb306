"""Seconds of one expert on the threads that compute it, for policies that weigh moves."""

from __future__ import annotations

import itertools
import math
from time import perf_counter, thread_time

import numpy as np
import torch

from lowtide.core import Curve, MoEShape
from lowtide.experts.layout import SlotLayout
from lowtide.experts.slots import ExpertSlots
from lowtide.kernels.reference import REFERENCE, Kernels
from lowtide.memory.arena import Arena
from lowtide.threads.executor import process_threads_kept, set_cores_per_product

MEASURE_S = 0.15
"""Seconds of measured rounds."""

COLD_BYTES = 32 << 20
"""Weights of the measurement: far more than a core's own caches."""

_MIN_ROUNDS = 3
_MAX_TOKENS = 512  # rows of the largest pass


def measure_device_s(
    layout: SlotLayout,
    shape: MoEShape,
    kernels: Kernels = REFERENCE,
    cores_per_expert: int = 1,
) -> Curve:
    """Measure the seconds of one expert's gated MLP on one compute thread, by tokens: 1, 2, 4 ...

    Medians of rounds over all counts. Each product uses weights that have left the caches, as in a
    model. For a very large expert a slice is measured: time grows with its width.
    """
    largest = layout.largest
    formats_of = largest.largest_formats
    block_size = max(each.block_size for each in formats_of)
    width = min(shape.expert_size, COLD_BYTES // 2 * shape.expert_size // largest.num_bytes)
    width = max(block_size, width - width % block_size)
    kept = () if largest.is_plain else formats_of
    one_layer = shape._replace(expert_size=width, num_layers=1)
    cold = SlotLayout.of(one_layer, layout.dtype, largest.weights, [kept])
    experts = _ColdExperts(cold, kernels)
    with process_threads_kept(), torch.inference_mode():
        set_cores_per_product(cores_per_expert)
        counts = experts.affordable_counts()
        rounds: list[list[float]] = []
        end_s = perf_counter() + MEASURE_S
        while len(rounds) < _MIN_ROUNDS or perf_counter() < end_s:
            rounds.append([experts.run_s(num_tokens) for num_tokens in counts])
    seconds = np.median(rounds, axis=0) * (shape.expert_size / width)
    # A count that took longer than a larger one was held up by something.
    seconds = np.minimum.accumulate(seconds[::-1])[::-1]
    return Curve(list(zip(counts, seconds.tolist(), strict=True)))


class _ColdExperts:
    """Endless rotation of experts that are together too large for a core's caches."""

    def __init__(self, layout: SlotLayout, kernels: Kernels) -> None:
        """layout: of one layer."""
        self._kernels, self._dtype = kernels, layout.dtype
        self._width, self._hidden = layout.largest.parts[0].shape
        num_experts = max(2, math.ceil(COLD_BYTES / layout.num_bytes))
        arena = Arena(num_experts * layout.num_bytes)
        arena.bytes.view(layout.dtype).fill_(0.01)
        self._slots = ExpertSlots(arena, layout)
        self._indices = itertools.cycle(range(num_experts))

    def affordable_counts(self) -> list[int]:
        """Token counts, at least two, of which the least number of rounds fits into the time."""
        counts: list[int] = []
        num_tokens, round_s, last_s = 1, 0.0, 0.0
        while num_tokens <= _MAX_TOKENS and (
            len(counts) < 2 or round_s + 2 * last_s < MEASURE_S / _MIN_ROUNDS
        ):
            # The first product of its size does more than compute.
            self.run_s(num_tokens)
            last_s = self.run_s(num_tokens)
            round_s += last_s
            counts.append(num_tokens)
            num_tokens *= 2
        return counts

    def run_s(self, num_tokens: int) -> float:
        """Seconds of the next expert's products, by the thread's clock: others use the core too."""
        weights = self._slots.weights(0, next(self._indices))
        x, out, gate, up = (
            torch.full((num_tokens, size), 0.01, dtype=self._dtype)
            for size in (self._hidden, self._hidden, self._width, self._width)
        )
        start_s = thread_time()
        self._kernels.gated_mlp(x, weights, gate, up, out)
        return thread_time() - start_s
