"""From logits to tokens: the arg-max, or a seeded draw, and how sure the model is of it.

A draw is a pure function of (seed, position, number of the sequence's pass): what else runs in
the batch, and in which order rows are looked at, cannot change it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtide.core import IntArray
from lowtide.errors import InternalError
from lowtide.params import SamplingParams

FloatArray = NDArray[np.float32]

TINY = torch.finfo(torch.float32).tiny


class Sampling(NamedTuple):
    """How a request's tokens are chosen. `top_k`, `top_p` and `min_p` matter to draws only."""

    temperature: float = 0.0  # 0 is the arg-max
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    min_p: float | None = None

    @classmethod
    def of(cls, params: SamplingParams, seed: int) -> Sampling:
        return cls(params.temperature, params.top_k, params.top_p, seed, params.min_p)


def choose_tokens(
    logits: Tensor,
    sampling: Sampling,
    positions: Sequence[int] | IntArray,
    num_passes: int,
    excluded: int | None = None,
) -> tuple[IntArray, FloatArray]:
    """A token for each row, and its confidence.

    logits: float32 [n, vocab]; overwritten. positions: [n], where the rows lie in their sequence.
    num_passes: passes that this sequence has had before. excluded: a token that is not chosen.
    At temperature 0 the confidence is the softmax probability of the arg-max (the lowest id on
    ties). Above 0 it is the probability of the drawn token among those that it was drawn from,
    after temperature, top-k, top-p and min-p, as in the published decoder of LLaDA2.
    Raises InternalError when a row has a NaN, an infinity, or nothing to choose.
    """
    if excluded is not None:
        logits[:, excluded] = -math.inf
    best = logits.argmax(dim=-1)  # the first of equals; a NaN counts as the greatest
    greatest = logits.gather(-1, best[:, None])
    _check_finite(greatest, positions)
    logits.sub_(greatest)
    if sampling.temperature > 0:
        return _draw_rows(logits, sampling, positions, num_passes)
    confidence = logits.exp_().sum(dim=-1).reciprocal_()  # exp of the arg-max's logit is 1
    return best.cpu().numpy(), confidence.cpu().numpy()


def choose_next(
    logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]
) -> IntArray:
    """The next token [n] of n sequences, each by its own `Sampling`.

    logits: float32 [n, vocab]; overwritten. positions: [n], where the tokens will lie.
    The arg-max (the lowest id on ties) at temperature 0, else a draw that depends on seed and
    position only. Raises InternalError as `choose_tokens` does.
    """
    best = logits.argmax(dim=-1)
    greatest = logits.gather(-1, best[:, None])
    _check_finite(greatest, positions)
    tokens: IntArray = best.cpu().numpy()
    if any(sampling.temperature > 0 for sampling in samplings):
        logits.sub_(greatest)
    for row, (sampling, position) in enumerate(zip(samplings, positions, strict=True)):
        if sampling.temperature > 0:
            tokens[row], _ = _draw(logits[row], sampling, position, 0)
    return tokens


def uniform(seed: int, position: int, num_passes: int) -> float:
    """The random number in [0, 1) of a position in a pass, by counter (Philox)."""
    counter = (num_passes << 128) | (position << 64)
    return float(np.random.Generator(np.random.Philox(key=seed, counter=counter)).random())


def _draw_rows(
    logits: Tensor, sampling: Sampling, positions: Sequence[int] | IntArray, num_passes: int
) -> tuple[IntArray, FloatArray]:
    tokens = np.empty(len(positions), np.int64)
    confidence = np.empty(len(positions), np.float32)
    for row, position in enumerate(positions):
        tokens[row], confidence[row] = _draw(logits[row], sampling, int(position), num_passes)
    return tokens, confidence


def _draw(row: Tensor, sampling: Sampling, position: int, num_passes: int) -> tuple[int, float]:
    """One token of a row [vocab], whose greatest logit is 0, and its probability.

    Filters in transformers' order: temperature, top-k, top-p, min-p. Then the distribution is
    inverted at a random number.
    """
    number = uniform(sampling.seed, position, num_passes)
    row.div_(max(sampling.temperature, TINY))  # the greatest logit is 0 and stays it
    ids: Tensor | None = None
    if sampling.top_k is not None and sampling.top_k < row.shape[0]:
        least = row.topk(sampling.top_k).values[-1]
        row.masked_fill_(row < least, -math.inf)  # tokens as likely as the k-th stay, too
    if sampling.top_p is not None and sampling.top_p < 1:
        row, ids = row.sort(descending=True, stable=True)
        mass = row.softmax(dim=-1).cumsum(dim=-1)
        # A token stays when those before it have not yet passed `top_p`; the first always does.
        num_kept = 1 + int((mass[:-1] <= sampling.top_p).sum())
        row, ids = row[:num_kept], ids[:num_kept]
    if sampling.min_p:
        # Relative to the likeliest token, so in logits a distance from the greatest, 0.
        row.masked_fill_(row < math.log(sampling.min_p), -math.inf)
    probability = row.softmax(dim=-1)
    mass = probability.cumsum(dim=-1, dtype=torch.float64)
    total = float(mass[-1])
    target = min(number * total, math.nextafter(total, 0.0))
    choice = int(torch.searchsorted(mass, target, right=True))
    return int(choice if ids is None else ids[choice]), float(probability[choice])


def _check_finite(greatest: Tensor, positions: Sequence[int] | IntArray) -> None:
    is_finite = greatest.isfinite().flatten()
    if not is_finite.all():
        row = int(is_finite.int().argmin())
        raise InternalError(
            f"The logits at position {int(positions[row])} are not finite "
            f"(greatest: {float(greatest[row])}); are the weights? check_weights reads them all."
        )
