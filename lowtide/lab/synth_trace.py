"""Synthetic routing traces: a block-diffusion run whose locality is a number one chooses.

Every row has a score per layer and expert: a popularity that all rows share, and a part of its
own that follows a stationary autoregression from step to step. The top-k scores are its experts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lowtide.core import Step, StepKind
from lowtide.errors import UsageError
from lowtide.trace import Trace, TraceShape, TraceWriter

FloatScores = NDArray[np.float32]


def synth_trace(
    shape: TraceShape,
    *,
    num_blocks: int = 4,
    steps_per_block: int = 8,
    block_length: int = 32,
    num_prompt_rows: int = 64,
    locality: float = 0.95,
    skew: float = 1.0,
    seed: int = 0,
) -> Trace:
    """A prefill and `num_blocks` blocks of `steps_per_block` denoising passes.

    locality: correlation of a row's scores with those one step ago, 0 (none) to 1 (frozen).
    skew: standard deviation of the shared popularity, in units of the rows' own part.
    Tokens become final at an even pace within a block.
    """
    if not 0 <= locality <= 1 or skew < 0 or min(num_blocks, steps_per_block, block_length) < 1:
        raise UsageError(
            f"A synthetic trace needs a locality from 0 to 1, a skew from 0 and at least one "
            f"block, step and row, not {locality}, {skew}, {num_blocks} x {steps_per_block} x "
            f"{block_length}."
        )
    draw = np.random.default_rng(seed)
    layers, experts, _ = shape[:3]
    popularity = skew * draw.standard_normal((layers, experts), np.float32)
    writer = TraceWriter("synthetic", shape)
    if num_prompt_rows:
        own = draw.standard_normal((num_prompt_rows, layers, experts), np.float32)
        writer.append(Step(StepKind.PREFILL, 0), 0, _top_k(popularity + own, shape))
    for block in range(num_blocks):
        own = draw.standard_normal((block_length, layers, experts), np.float32)
        for index in range(steps_per_block):
            done = block_length * index // steps_per_block
            num_new = block_length * (index + 1) // steps_per_block - done
            ids = _top_k(popularity + own, shape)
            writer.append(Step(StepKind.DENOISE, index), block, ids, num_committed=num_new)
            own = _drifted(own, locality, draw)
    return writer.trace()


def _drifted(own: FloatScores, locality: float, draw: np.random.Generator) -> FloatScores:
    """One step on: correlation `locality` with the last one, the same variance."""
    fresh = draw.standard_normal(own.shape, np.float32)
    return np.float32(locality) * own + np.float32(np.sqrt(1 - locality**2)) * fresh


def _top_k(scores: FloatScores, shape: TraceShape) -> NDArray[np.int64]:
    """scores [rows, layers, experts] -> ids [rows, layers, k], ascending"""
    k = shape.num_experts_per_token
    ids = np.argpartition(-scores, k - 1, axis=2)[:, :, :k]
    return np.sort(ids.astype(np.int64), axis=2)
