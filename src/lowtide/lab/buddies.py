"""Counts which experts are chosen together while a model runs, for a buddy profile.

    counts = CoActivations(TraceShape(*llm.config.moe_shape))
    with llm.observed(counts):
        llm.generate(...)
    profile = counts.profile(llm.fingerprint)

Holds [layers, experts, experts] and samples of bounded size, however long the run is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lowtide.core import FloatArray, IntArray, Step, WeightArray
from lowtide.errors import UnsupportedError, UsageError
from lowtide.experts.rows import Routing
from lowtide.policies.buddy_profile import WEIGHT_UNIT, BuddyProfile
from lowtide.replay.trace import TraceShape

SAMPLE_TOKENS = 2048
"""Tokens of each layer whose weights are kept, for percentiles of the entropy gate."""
_PAIR_ROWS = 1024  # counted at a time


class EvenSample:
    """Rows of a stream, evenly spread over all of it, at most `limit`, at least half of that."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._stride = 1
        self._num_seen = 0
        self._rows: list[NDArray[np.generic]] = []

    def see(self, rows: NDArray[np.generic]) -> None:
        """Add rows [n, ...], the next of the stream."""
        first = -self._num_seen % self._stride
        self._rows.extend(row.copy() for row in rows[first :: self._stride])
        self._num_seen += len(rows)
        while len(self._rows) > self._limit:
            self._rows = self._rows[::2]
            self._stride *= 2

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, count: int) -> NDArray[np.generic]:
        """Return the first `count` rows, or all: [count, ...]."""
        return np.stack(self._rows[:count])


class ProfileChoices(NamedTuple):
    """Choices in making a profile from counts (sections 3.1 to 3.3 of the paper)."""

    is_weighted: bool = False  # a pair's tokens count by the lesser of their two weights
    temperature: float = 1.0  # of weights, before their entropy is taken
    alphas: tuple[float, ...] | None = None  # of each MoE layer; None: the default everywhere


AS_COUNTED = ProfileChoices()


def layer_alphas(text: str, num_layers: int) -> tuple[float, ...]:
    """Parse one share for all layers, one for each, or `FIRST:LAST`, evenly spaced between.

    Raises UsageError for anything else, and for shares that are not above 0 to 1.
    """
    ends = text.split(":")
    try:
        given = [float(part) for part in (ends if len(ends) == 2 else text.split(","))]
    except ValueError:
        given = []
    if len(ends) == 2 and len(given) == 2:
        # A share such as 0.95 is its decimal, so steps between are rounded to decimals, too.
        given = [round(float(share), 6) for share in np.linspace(given[0], given[1], num_layers)]
    elif len(given) == 1:
        given *= num_layers
    if len(given) != num_layers or not all(0 < share <= 1 for share in given):
        raise UsageError(
            f"--buddy-alpha is a share above 0 to 1, one for each of the {num_layers} MoE layers "
            f"separated by commas, or FIRST:LAST, not {text!r}."
        )
    return tuple(given)


class CoActivations:
    """An observer that counts the choices of every layer's router, row by row."""

    def __init__(self, shape: TraceShape, choices: ProfileChoices = AS_COUNTED) -> None:
        """Raises UnsupportedError for a model whose tokens choose only one expert."""
        if shape.num_experts_per_token < 2:
            raise UnsupportedError(
                "Buddies are experts that a token chooses together, and this model's tokens choose "
                "one expert each; calibrate it without --buddies."
            )
        layers, experts = shape[:2]
        self.activations: IntArray = np.zeros((layers, experts), np.int64)
        self._together: IntArray = np.zeros((layers, experts * experts), np.int64)
        self._weights = [EvenSample(SAMPLE_TOKENS) for _ in range(layers)]
        self._choices = choices
        self._weighted = np.zeros_like(self._together) if choices.is_weighted else None

    def saw_layer(self, layer: int, step: Step, x: Tensor, routing: Routing, out: Tensor) -> None:
        self.count(layer, *(tensor.cpu().numpy() for tensor in routing))

    def count(self, layer: int, experts: IntArray, weights: WeightArray) -> None:
        """Count a layer's routing of further rows: experts, weights [rows, k]."""
        for start in range(0, len(experts), _PAIR_ROWS):
            rows = slice(start, start + _PAIR_ROWS)
            self._count(layer, experts[rows], shares(weights[rows]))

    def profile(self, fingerprint: str) -> BuddyProfile:
        """Return the profile so far. Raise UsageError if too little was counted."""
        count = min(map(len, self._weights))
        if not count:
            raise UsageError("No token was routed in every MoE layer: there are no buddies.")
        layers, experts = self.activations.shape
        weighted = None
        if self._weighted is not None:
            weighted = self._weighted.reshape(layers, experts, experts).copy()
        return BuddyProfile(
            fingerprint=fingerprint,
            num_tokens=int(self.activations[0].sum()) // self._weights[0].rows(1).shape[1],
            activations=self.activations.copy(),
            together=self._together.reshape(layers, experts, experts).copy(),
            sample=np.stack([each.rows(count) for each in self._weights]).astype(np.float32),
            weighted=weighted,
            temperature=self._choices.temperature,
            alphas=None if self._choices.alphas is None else np.array(self._choices.alphas),
        )

    def _count(self, layer: int, experts: IntArray, share: FloatArray) -> None:
        num_experts, k = self.activations.shape[1], experts.shape[1]
        self.activations[layer] += np.bincount(experts.ravel(), minlength=num_experts)
        is_other = ~np.eye(k, dtype=bool)
        pairs = (experts[:, :, None] * num_experts + experts[:, None, :])[:, is_other].ravel()
        self._together[layer] += np.bincount(pairs, minlength=num_experts**2)
        if self._weighted is not None:
            units = np.rint(share * WEIGHT_UNIT)
            lesser = np.minimum(units[:, :, None], units[:, None, :])[:, is_other].ravel()
            sums = np.bincount(pairs, lesser, minlength=num_experts**2)  # whole numbers
            self._weighted[layer] += sums.astype(np.int64)
        self._weights[layer].see(-np.sort(-share, axis=1).astype(np.float32))


def shares(weights: WeightArray) -> FloatArray:
    """Normalise weights of chosen experts [rows, k] to sum 1; equal shares if a row is all 0."""
    total = weights.sum(axis=1, keepdims=True, dtype=np.float64)
    even = np.full(weights.shape, 1 / weights.shape[1])
    share: FloatArray = np.divide(weights, total, out=even, where=total > 0)
    return share


def needed_tokens(shape: TraceShape) -> int:
    """Return the number of tokens that a profile needs at least.

    Each expert is chosen 16 times in the mean, and each pair of experts together once.
    """
    experts, k = shape.num_experts, shape.num_experts_per_token
    by_pair = experts * (experts - 1) / (k * (k - 1))
    return int(np.ceil(max(16 * experts / k, by_pair)))
