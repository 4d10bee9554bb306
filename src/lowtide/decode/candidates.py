"""Masked diffusion's candidates: a token for each row of logits, and the model's confidence in it.

At temperature 0 a few statistics of each row suffice. Drawing, or filtering before probabilities
are measured, needs whole rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtide.core import FloatArray, IntArray
from lowtide.decode.sampling import (
    TINY,
    Sampling,
    check_finite,
    find_best,
    invert,
    uniform,
)

LOG_OFFSET = 1e-10
"""Added inside the logarithm of an entropy, as published by Dream."""


class RowChoices(NamedTuple):
    """Statistics of each row's softmax, in host memory."""

    best: IntArray  # [rows] the likeliest token, the lowest id on ties
    greatest: FloatArray  # [rows] its logit; where that is not finite the others mean nothing
    probability: FloatArray  # [rows] its probability, exact near 1 too: the rest is summed apart
    second: FloatArray  # [rows] the second greatest probability; zeros where not asked for
    entropy: FloatArray  # [rows] -sum p log(p + LOG_OFFSET); zeros where it was not asked for

    def part(self, rows: slice | IntArray) -> RowChoices:
        """Return the statistics of some rows."""
        return RowChoices._make(values[rows] for values in self)


class Candidates(NamedTuple):
    """Candidate tokens at some positions, with the facts that rules use."""

    tokens: IntArray  # [n]
    probability: FloatArray  # [n] of the token
    margin: FloatArray  # [n] the greatest probability less the second
    entropy: FloatArray  # [n]

    @classmethod
    def empty(cls, num_positions: int) -> Candidates:
        """Make unset candidates for `num_positions` positions."""
        tokens = np.zeros(num_positions, np.int64)
        return cls(tokens, *(np.zeros(num_positions) for _ in range(3)))

    @classmethod
    def likeliest(cls, statistics: RowChoices, positions: IntArray) -> Candidates:
        """Take each row's arg-max. Raise NumericError for a row that is not finite.

        positions: [n], the rows' positions in their sequence.
        """
        best, greatest, probability, second, entropy = statistics
        check_finite(torch.from_numpy(greatest), positions)
        return cls(best.copy(), probability.copy(), probability - second, entropy)

    def put(self, part: slice, others: Candidates) -> None:
        """Copy `others` into `part` of these candidates."""
        for mine, theirs in zip(self, others, strict=True):
            mine[part] = theirs


class Reading(NamedTuple):
    """Numbers that a request needs of its rows.

    is_measured_as_drawn: probabilities are measured after temperature and filters, also at
    temperature 0, as in Dream; otherwise by the model's own softmax, as in LLaDA.
    """

    sampling: Sampling
    is_measured_as_drawn: bool = False
    needs_second: bool = False
    needs_entropy: bool = False
    excluded: int | None = None  # a token that is not chosen

    @property
    def needs_logits(self) -> bool:
        """True if statistics do not suffice and whole rows are needed."""
        is_changed = self.is_filtered or self.excluded is not None
        return self.sampling.temperature > 0 or is_changed

    @property
    def is_filtered(self) -> bool:
        """True if filters reduce the vocabulary before probabilities are measured."""
        return self.is_measured_as_drawn and self.sampling.is_filtered


def read_rows(logits: Tensor, reading: Reading, positions: IntArray, num_steps: int) -> Candidates:
    """Return a candidate for each row.

    logits: float32 [n, vocab] in host memory; overwritten.
    positions: [n], the rows' positions in their sequence.
    num_steps: the sequence's steps so far; with seed and position they determine the draw.

    Raises NumericError for a row that is not finite.
    """
    if reading.excluded is not None:
        logits[:, reading.excluded] = -math.inf
    if reading.is_filtered or (reading.is_measured_as_drawn and reading.sampling.temperature > 0):
        check_finite(find_best(logits)[1], positions)
        for row in logits:
            _shape(row, reading.sampling)
    own = logits.clone() if reading.sampling.temperature > 0 else logits
    statistics = row_statistics(logits, reading.needs_entropy)
    candidates = Candidates.likeliest(statistics, positions)
    if reading.sampling.temperature > 0:
        _draw_rows(own, reading, positions, num_steps, statistics, candidates)
    return candidates


def row_statistics(logits: Tensor, needs_entropy: bool) -> RowChoices:
    """Return statistics of the rows of logits, float32 [n, vocab] in host memory; overwritten.

    The probabilities of all but the likeliest token are added in double precision, so that two
    confidences close to 1 stay distinguishable.
    """
    best, greatest = find_best(logits)
    own = greatest[:, 0].double()
    weights = logits.sub_(greatest).exp_()
    weights.scatter_(-1, best[:, None], 0)
    total = 1 + weights.sum(dim=-1, dtype=torch.float64)
    second = weights.amax(dim=-1).double() / total
    probability = total.reciprocal()
    entropy = torch.zeros_like(total)
    if needs_entropy:
        weights.scatter_(-1, best[:, None], 1)
        shares = weights.div_(total[:, None])
        entropy = -(shares * (shares + LOG_OFFSET).log_()).sum(dim=-1, dtype=torch.float64)
    found = (own, probability, second, entropy)
    return RowChoices(best.numpy(), *(values.numpy() for values in found))


def _draw_rows(
    logits: Tensor,
    reading: Reading,
    positions: IntArray,
    num_steps: int,
    statistics: RowChoices,
    candidates: Candidates,
) -> None:
    """Draw a token for each candidate and set its probability.

    logits [n, vocab]: those of `statistics`; temperature and filters are applied here unless they
    were applied before.
    """
    sampling = reading.sampling
    for index, (row, position) in enumerate(zip(logits, positions.tolist(), strict=True)):
        best = int(statistics.best[index])
        shaped = row if reading.is_measured_as_drawn else _shape(row.clone(), sampling)
        token = invert(shaped.softmax(dim=-1), uniform(sampling.seed, position, num_steps))
        candidates.tokens[index] = token
        ratio = math.exp(float(row[token]) - float(row[best]))
        candidates.probability[index] = statistics.probability[index] * ratio


def _shape(row: Tensor, sampling: Sampling) -> Tensor:
    """Apply temperature and filters to one row [vocab] in place; filtered logits become -inf.

    In Dream's order: temperature, top-p, top-k; then min-p, which Dream does not have.
    """
    row.sub_(row.max())
    if sampling.temperature > 0:
        row.div_(max(sampling.temperature, TINY))
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, ids = row.sort(descending=True, stable=True)
        mass = ordered.softmax(dim=-1).cumsum(dim=-1)
        # A token stays when those before it have not yet passed `top_p`; the first always does.
        row[ids[1:][mass[:-1] > sampling.top_p]] = -math.inf
    if sampling.top_k and sampling.top_k < len(row):
        row.masked_fill_(row < row.topk(sampling.top_k).values[-1], -math.inf)
    if sampling.min_p:
        row.masked_fill_(row < math.log(sampling.min_p), -math.inf)
    return row
