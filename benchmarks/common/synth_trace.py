"""Synthetic routing traces: runs whose locality is a number one chooses.

Every row has a score per layer and expert: a popularity that all rows share, and a part of its
own that follows a stationary autoregression from step to step. The top-k scores are its experts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lowtide.core import Step, StepKind
from lowtide.errors import UsageError
from lowtide.lab.calibration_report import step_similarity
from lowtide.replay.trace import Trace, TraceShape, TraceWriter

FloatScores = NDArray[np.float32]

_MAX_ROWS = 512  # of one prefill pass
_NUM_HALVINGS = 12


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
    _check_run(locality, skew, num_blocks, steps_per_block, block_length)
    draw = np.random.default_rng(seed)
    popularity = _popularity(shape, skew, draw)
    writer = TraceWriter("synthetic", shape)
    _prefill(writer, shape, np.broadcast_to(popularity, (num_prompt_rows, *popularity.shape)), draw)
    for block in range(num_blocks):
        own = _own(block_length, shape, draw)
        for index in range(steps_per_block):
            done = block_length * index // steps_per_block
            num_new = block_length * (index + 1) // steps_per_block - done
            ids = _top_k(popularity + own, shape)
            writer.append(Step(StepKind.DENOISE, index), block, ids, num_committed=num_new)
            own = _drifted(own, locality, draw)
    return writer.trace()


def synth_decode_trace(
    shape: TraceShape,
    *,
    num_sequences: int = 1,
    num_rounds: int = 1,
    num_prompt: int = 64,
    num_new: int = 64,
    locality: float = 0.0,
    skew: float = 0.5,
    taste: float = 0.5,
    seed: int = 0,
    text: int = 0,
) -> Trace:
    """Draw a prefill of `num_sequences` prompts, then `num_new` passes of one token per sequence.

    This is repeated `num_rounds` times, with other sequences each time.

    num_prompt: tokens of each prompt. locality, skew: as `synth_trace`'s, from token to token.
    taste: standard deviation of a sequence's lasting preferences, in the same units as `skew`.
    seed, text: seeds of the popularity, which is the model's, and of the sequences.
    """
    _check_run(locality, min(skew, taste), num_new, num_sequences, num_rounds)
    popularity = _popularity(shape, skew, np.random.default_rng(seed))
    draw = np.random.default_rng([seed, text])
    writer = TraceWriter("synthetic", shape)
    for _ in range(num_rounds):
        lasting = popularity + np.float32(taste) * _own(num_sequences, shape, draw)
        _prefill(writer, shape, np.repeat(lasting, num_prompt, axis=0), draw)
        own = _own(num_sequences, shape, draw)
        for index in range(num_new):
            ids = _top_k(lasting + own, shape)
            writer.append(Step(StepKind.DECODE, index), 0, ids, num_committed=num_sequences)
            own = _drifted(own, locality, draw)
    return writer.trace()


def locality_for(
    similarity: float, shape: TraceShape, num_rows: int, skew: float = 1.0, seed: int = 0
) -> float:
    """The locality at which the hits of a block's neighbouring steps have this cosine.

    num_rows: rows of a pass, for more rows are more alike. Raises UsageError where steps that
    have nothing in common but the popularity are more alike already.
    """
    one = shape._replace(num_layers=1)

    def reached(locality: float) -> float:
        trace = synth_trace(
            one,
            num_blocks=8,
            steps_per_block=8,
            block_length=num_rows,
            num_prompt_rows=0,
            locality=locality,
            skew=skew,
            seed=seed,
        )
        return float(step_similarity(trace.blocks()).mean())

    return _halved(reached, similarity)


def _halved(reached: Callable[[float], float], similarity: float) -> float:
    """Where from 0 to 1 this rising function reaches `similarity`, by halving."""
    low, high = 0.0, 1.0
    least, most = reached(low), reached(high)
    if not least <= similarity <= most:
        raise UsageError(
            f"Synthetic steps can be alike from {least:.3f} to {most:.3f} here, "
            f"not {similarity:.3f}; choose another similarity or popularity."
        )
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) < similarity else (low, middle)
    return (low + high) / 2


def _check_run(locality: float, skew: float, *counts: int) -> None:
    if not 0 <= locality <= 1 or skew < 0 or min(counts) < 1:
        raise UsageError(
            f"A synthetic trace needs a locality from 0 to 1, a skew from 0 and at least one "
            f"block, step and row, not {locality}, {skew}, {' x '.join(map(str, counts))}."
        )


def _popularity(shape: TraceShape, skew: float, draw: np.random.Generator) -> FloatScores:
    return skew * draw.standard_normal((shape.num_layers, shape.num_experts), np.float32)


def _own(num_rows: int, shape: TraceShape, draw: np.random.Generator) -> FloatScores:
    return draw.standard_normal((num_rows, shape.num_layers, shape.num_experts), np.float32)


def _prefill(
    writer: TraceWriter, shape: TraceShape, lasting: FloatScores, draw: np.random.Generator
) -> None:
    """Lasting [rows, layers, experts]: what each row's scores have beside its own part."""
    for start in range(0, len(lasting), _MAX_ROWS):
        rows = lasting[start : start + _MAX_ROWS]
        ids = _top_k(rows + _own(len(rows), shape, draw), shape)
        writer.append(Step(StepKind.PREFILL, 0), 0, ids)


def _drifted(own: FloatScores, locality: float, draw: np.random.Generator) -> FloatScores:
    """One step on: correlation `locality` with the last one, the same variance."""
    fresh = draw.standard_normal(own.shape, np.float32)
    return np.float32(locality) * own + np.float32(np.sqrt(1 - locality**2)) * fresh


def _top_k(scores: FloatScores, shape: TraceShape) -> NDArray[np.int64]:
    """Scores [rows, layers, experts] -> ids [rows, layers, k], ascending."""
    k = shape.num_experts_per_token
    ids = np.argpartition(-scores, k - 1, axis=2)[:, :, :k]
    return np.sort(ids.astype(np.int64), axis=2)
