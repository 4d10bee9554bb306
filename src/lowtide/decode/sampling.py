"""Chooses tokens from logits: the arg-max or a seeded draw, with its confidence.

A draw is a pure function of (seed, position, number of the sequence's pass). The rest of the batch
and the order of rows cannot change it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtide.core import IntArray
from lowtide.errors import InternalError, NumericError
from lowtide.params import SamplingParams

FloatArray = NDArray[np.float32]

_log = logging.getLogger(__name__)

TINY = torch.finfo(torch.float32).tiny


FILTERS = {"top_k": 0, "top_p": 1, "min_p": 0}
"""Parameters that affect draws only -> the value that turns one off, as None does."""


class Sampling(NamedTuple):
    """Parameters for choosing a request's tokens."""

    temperature: float = 0.0  # 0 is the arg-max
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    min_p: float | None = None

    @classmethod
    def of(cls, params: SamplingParams, seed: int) -> Sampling:
        return cls(params.temperature or 0.0, params.top_k, params.top_p, seed, params.min_p)

    @property
    def is_filtered(self) -> bool:
        """True if filters reduce the vocabulary."""
        return bool(filters_in(self))


class ArgMax:
    """Arg-max of rows of logits, in host memory; all that a choice at temperature 0 needs."""

    __slots__ = ("_rows",)

    def __init__(self, rows: Tensor) -> None:
        """rows: float64 [n, 3], as `find_arg_max` fills them."""
        self._rows = rows

    def __getitem__(self, part: slice) -> ArgMax:
        return ArgMax(self._rows[part])

    @property
    def tokens(self) -> IntArray:
        """The likeliest token of each row, [n]; the lowest id on ties."""
        tokens: IntArray = self._rows[:, 0].long().numpy()
        return tokens

    @property
    def greatest(self) -> Tensor:
        """The logit of each row's likeliest token, float32 [n]."""
        return self._rows[:, 1].float()

    @property
    def confidence(self) -> FloatArray:
        """The softmax probability of each row's likeliest token, [n]."""
        confidence: FloatArray = self._rows[:, 2].float().numpy()
        return confidence


def find_arg_max(logits: Tensor, out: Tensor) -> None:
    """Write each row's arg-max, its logit and its probability to `out`, on the logits' device.

    logits: float32 [n, vocab]; overwritten. out: float64 [n, 3], which holds ids and float32
    exactly, so that one copy to the host suffices.
    """
    best, greatest = find_best(logits)
    out[:, 0] = best
    out[:, 1] = greatest[:, 0]
    out[:, 2] = _confidence(logits.sub_(greatest))


def choose_tokens(
    logits: Tensor | ArgMax,
    sampling: Sampling,
    positions: Sequence[int] | IntArray,
    num_passes: int,
    excluded: int | None = None,
) -> tuple[IntArray, FloatArray]:
    """Choose a token for each row; return the tokens and their confidence.

    logits: float32 [n, vocab] in host memory; overwritten. At temperature 0 without `excluded`
    their arg-max suffices.
    positions: [n], the rows' positions in their sequence.
    num_passes: the sequence's passes so far.
    excluded: a token that is never chosen.

    At temperature 0 the confidence is the softmax probability of the arg-max (the lowest id on
    ties). Above 0 it is the drawn token's probability among the tokens it was drawn from, after
    temperature, top-k, top-p and min-p, as in LLaDA2's published decoder. Raises NumericError if a
    row has a NaN, an infinity or no token to choose.
    """
    if isinstance(logits, ArgMax):
        if excluded is not None or sampling.temperature > 0:
            raise InternalError("Tokens are to be chosen from logits, and only their arg-max came.")
        check_finite(logits.greatest, positions)
        return logits.tokens, logits.confidence
    if excluded is not None:
        logits[:, excluded] = -math.inf
    best, greatest = find_best(logits)
    check_finite(greatest, positions)
    logits.sub_(greatest)
    if sampling.temperature > 0:
        return _draw_rows(logits, sampling, positions, num_passes)
    return best.numpy(), _confidence(logits).numpy()


def choose_next(
    logits: Tensor | ArgMax, samplings: Sequence[Sampling], positions: Sequence[int]
) -> IntArray:
    """Choose the next token [n] of n sequences, each by its own `Sampling`.

    logits: float32 [n, vocab] in host memory; overwritten. If every temperature is 0 their arg-max
    suffices.
    positions: [n], the positions of the new tokens.

    At temperature 0 it is the arg-max (the lowest id on ties), else a draw that depends only on
    seed and position. Raises NumericError as `choose_tokens` does.
    """
    if isinstance(logits, ArgMax):
        check_finite(logits.greatest, positions)
        return logits.tokens
    best, greatest = find_best(logits)
    check_finite(greatest, positions)
    tokens: IntArray = best.numpy()
    if any(sampling.temperature > 0 for sampling in samplings):
        logits.sub_(greatest)
    for row, (sampling, position) in enumerate(zip(samplings, positions, strict=True)):
        if sampling.temperature > 0:
            tokens[row], _ = _draw(logits[row], sampling, position, 0)
    return tokens


def uniform(seed: int, position: int, num_passes: int) -> float:
    """Return the random number in [0, 1) of a position and pass, by counter (Philox)."""
    counter = (num_passes << 128) | (position << 64)
    return float(np.random.Generator(np.random.Philox(key=seed, counter=counter)).random())


def uniforms(seed: int, num_positions: int, num_passes: int) -> NDArray[np.float64]:
    """Return random numbers in [0, 1), [num_positions], for choosing among positions in a pass.

    They are independent of the numbers that choose tokens.
    """
    counter = (num_passes << 128) | (1 << 127)  # no position is as high
    return np.random.Generator(np.random.Philox(key=seed, counter=counter)).random(num_positions)


def invert(probability: Tensor, number: float) -> int:
    """Return the index at which a distribution [n], float32, reaches `number` in [0, 1)."""
    mass = probability.cumsum(dim=-1, dtype=torch.float64)
    total = float(mass[-1])
    target = min(number * total, math.nextafter(total, 0.0))
    return int(torch.searchsorted(mass, target, right=True))


def check_finite(greatest: Tensor, positions: Sequence[int] | IntArray) -> None:
    """Raise NumericError unless the greatest logit of each position's row is finite."""
    is_finite = greatest.isfinite().flatten()
    if not is_finite.all():
        row = int(is_finite.int().argmin())
        raise NumericError(
            f"The logits at position {int(positions[row])} are not finite "
            f"(greatest: {float(greatest[row])})."
        )


def rows_not_finite(logits: Tensor | ArgMax) -> list[int]:
    """Return the rows for which `check_finite` raises; call before logits are overwritten."""
    greatest = logits.greatest if isinstance(logits, ArgMax) else logits.amax(-1)
    rows: list[int] = (~greatest.isfinite()).nonzero().flatten().tolist()
    return rows


def find_best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the arg-max [n] of each row and its logit [n, 1]."""
    # Both name the first of equals, and a NaN as the greatest; numpy's is the faster one.
    best = torch.from_numpy(logits.numpy().argmax(-1)) if logits.is_cpu else logits.argmax(dim=-1)
    return best, logits.gather(-1, best[:, None])


def _confidence(logits: Tensor) -> Tensor:
    """Return the probability [n] of each row's arg-max, whose logit is 0; overwrites the logits."""
    return logits.exp_().sum(dim=-1).reciprocal_()  # exp of the arg-max's logit is 1


def _draw_rows(
    logits: Tensor, sampling: Sampling, positions: Sequence[int] | IntArray, num_passes: int
) -> tuple[IntArray, FloatArray]:
    tokens = np.empty(len(positions), np.int64)
    confidence = np.empty(len(positions), np.float32)
    for row, position in enumerate(positions):
        tokens[row], confidence[row] = _draw(logits[row], sampling, int(position), num_passes)
    return tokens, confidence


def _draw(row: Tensor, sampling: Sampling, position: int, num_passes: int) -> tuple[int, float]:
    """Draw a token from a row [vocab] whose greatest logit is 0; return it and its probability.

    Filters apply in transformers' order: temperature, top-k, top-p, min-p. Then the distribution is
    inverted at a random number.
    """
    number = uniform(sampling.seed, position, num_passes)
    row.div_(max(sampling.temperature, TINY))  # the greatest logit is 0 and stays it
    ids: Tensor | None = None
    if sampling.top_k and sampling.top_k < row.shape[0]:
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
    choice = invert(probability, number)
    return int(choice if ids is None else ids[choice]), float(probability[choice])


def filters_in(params: SamplingParams | Sampling) -> dict[str, float]:
    """Return the filters that are on, by name."""
    given = {name: getattr(params, name) for name in FILTERS}
    return {name: value for name, value in given.items() if value not in (None, FILTERS[name])}


def warn_if_never_drawn(params: SamplingParams) -> None:
    """Warn that filters have no effect at temperature 0, where no token is drawn."""
    filters = ", ".join(f"`{name}` {value}" for name, value in filters_in(params).items())
    if filters and not params.temperature:
        _warn_of_no_draws(filters)


@cache  # once, however many answers are asked for
def _warn_of_no_draws(filters: str) -> None:
    _log.warning(
        "%s: no effect at temperature 0, which always takes the likeliest token; give a "
        "`temperature` above 0 to draw.",
        filters,
    )
