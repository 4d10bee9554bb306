"""A buddy list: the experts that may stand in for one, best first, by a rule (BuddyMoE, 3.3).

`CFT` is the paper's cumulative frequency threshold: the shortest prefix of an expert's peers,
sorted by q, that covers a share alpha of its co-activations. Knows nothing of where q is from.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.core import BoolArray, FloatArray, IntArray, WeightArray
from lowtide.errors import UsageError

SMOOTHING = 1.0
"""Laplace's: added to the co-activations of every pair. The paper names no value."""
MAX_K_MAX = 64
"""Beyond the paper's 5 to 20, and a list that long is no list of buddies."""


class Ranking(enum.Enum):
    """What an expert's buddies are sorted by."""

    CO_ACTIVATION = "co-activation"  # q(j|i) of the number of tokens that chose both
    WEIGHTED = "weighted"  # q(j|i) of those tokens, each by the smaller of the two weights
    OUTPUTS = "outputs"  # lists as by co-activation, sorted by how alike outputs are
    WEIGHTS = "weights"  # the same by how alike weights are: a baseline


@dataclass(frozen=True, slots=True)
class BuddyRule:
    """How lists are made of counts.

    alpha: share of an expert's co-activations that its list covers (CFT, Eq. 5), in (0, 1], of
        all layers or of each; k_max: buddies of one expert, at most; smoothing: added to every
        pair's count, in tokens.
    """

    alpha: float | tuple[float, ...] = 0.95
    k_max: int = 16
    ranking: Ranking = Ranking.CO_ACTIVATION
    smoothing: float = SMOOTHING

    def alphas(self, num_layers: int) -> FloatArray:
        """One for each layer. Raises UsageError for those that cannot be."""
        given = self.alpha if isinstance(self.alpha, tuple) else (self.alpha,) * num_layers
        if len(given) != num_layers:
            raise UsageError(
                f"alpha has {len(given)} values and the model {num_layers} MoE layers; give one "
                "for each of them, or one for all."
            )
        for alpha in given:
            if not 0 < alpha <= 1:
                raise UsageError(
                    f"alpha must be above 0 and at most 1, not {alpha:g}: it is the share of an "
                    "expert's co-activations that its buddies cover."
                )
        return np.array(given, np.float64)

    def check(self, num_layers: int) -> None:
        """Raises UsageError for a rule that no list can be made by."""
        self.alphas(num_layers)
        if not 1 <= self.k_max <= MAX_K_MAX:
            raise UsageError(f"k_max must be from 1 to {MAX_K_MAX}, not {self.k_max}.")
        if not 0 <= self.smoothing < np.inf:
            raise UsageError(f"smoothing must be at least 0, not {self.smoothing:g}.")


class BuddyLists(NamedTuple):
    """What Algorithm 1 walks: the buddies of every expert of every layer, best first.

    The last axis is as long as `k_max`, or as all other experts where those are fewer. An expert
    that the calibration never saw has no buddies.
    """

    ids: NDArray[np.int32]  # [layers, experts, k_max], -1 behind the last buddy
    # [layers, experts, k_max] what `ids` are sorted by, never rising, 0 behind the last: q(j|i)
    # (Eq. 4), or where a similarity ranks, that. The `q` of Psi (Eq. 3).
    q: WeightArray
    lengths: NDArray[np.int32]  # [layers, experts]
    alphas: FloatArray  # [layers], as the rule gave them


def lists_of(q: FloatArray, rule: BuddyRule, similarity: WeightArray | None = None) -> BuddyLists:
    """The buddies of every expert (Eqs. 5 and 6).

    q [layers, i, j]: q(j|i), with a diagonal of 0; all of a row is 0 for an expert without
    buddies. Peers are sorted by q, ties by id; the shortest prefix that reaches alpha is the list.
    `similarity` [layers, i, j] sorts the prefix again, and is then what `BuddyLists.q` has. Then it
    is cut at `k_max`. Raises UsageError for a rule that cannot be.
    """
    rule.check(len(q))
    order, lengths = _prefixes(q, rule.alphas(len(q)))
    is_listed = np.arange(order.shape[2]) < lengths[:, :, None]
    if similarity is not None:
        q = similarity.astype(np.float64).clip(0)
        order = _sorted_anew(order, is_listed, q)
    width = min(rule.k_max, order.shape[2])
    ids, is_listed = order[:, :, :width], is_listed[:, :, :width]
    return BuddyLists(
        np.where(is_listed, ids, -1).astype(np.int32),
        np.where(is_listed, np.take_along_axis(q, ids, 2), 0).astype(np.float32),
        np.minimum(lengths, width).astype(np.int32),
        rule.alphas(len(q)),
    )


def prefix_lengths(q: FloatArray, alphas: FloatArray) -> IntArray:
    """Peers of every expert whose q sums to alpha, before lists are cut. [layers, experts]"""
    return _prefixes(q, alphas)[1]


def fitted_alphas(q: FloatArray, list_size: float) -> tuple[float, ...]:
    """For each layer the greatest alpha whose lists have `list_size` buddies in the mean, at most,
    before they are cut. Raises UsageError for a size that no list can have."""
    most = q.shape[2] - 1
    if not 1 <= list_size <= most:
        raise UsageError(
            f"Lists of {list_size:g} buddies in the mean cannot be: an expert has from 1 to {most}."
        )
    return tuple(_fitted_alpha(layer, list_size) for layer in q)


def _prefixes(q: FloatArray, alphas: FloatArray) -> tuple[IntArray, IntArray]:
    """Peers sorted by q [layers, experts, experts - 1], and how many of them reach alpha."""
    masked = np.where(np.eye(q.shape[1], dtype=bool), -1.0, q)
    order = np.argsort(-masked, axis=2, kind="stable")[:, :, :-1]
    covered = np.take_along_axis(q, order, 2).cumsum(axis=2)
    total = covered[:, :, -1:]
    # A share of the total as it was summed, so that the last peer covers exactly all of it.
    reaches = covered >= alphas[:, None, None] * total
    lengths = np.where(total[:, :, 0] > 0, reaches.argmax(axis=2) + 1, 0)
    return order, lengths


def _sorted_anew(order: IntArray, is_listed: BoolArray, similarity: FloatArray) -> IntArray:
    """The same lists sorted by similarity; of equal buddies the one of greater q comes first."""
    alike = np.where(is_listed, np.take_along_axis(similarity, order, 2), -1.0)
    return np.take_along_axis(order, np.argsort(-alike, axis=2, kind="stable"), 2)


def _fitted_alpha(q: FloatArray, list_size: float) -> float:
    """The greatest alpha of one layer, as `fitted_alphas` has it. q [experts, experts]"""
    covered = (-np.sort(-q, axis=1))[:, :-1].cumsum(axis=1)
    covered = covered[covered[:, -1] > 0]
    covered = covered / covered[:, -1:]
    alphas = np.unique(covered)
    low, high = 0, len(alphas) - 1  # the least alpha asks for one buddy of each
    while low < high:
        middle = (low + high + 1) // 2
        size = ((covered < alphas[middle]).sum(axis=1) + 1).mean()
        low, high = (middle, high) if size <= list_size else (low, middle - 1)
    return float(alphas[low])
