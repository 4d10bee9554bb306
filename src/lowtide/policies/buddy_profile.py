"""Which experts may stand in for which, by what a calibration saw of a router (BuddyMoE, 3.2, 3.3).

    lists = profile.lists(BuddyRule(alpha=0.95, k_max=16))
    lists.ids[layer, expert, : lists.lengths[layer, expert]]  # best buddy first

Counts are kept, lists are made of them when a rule is known: `alpha` and `k_max` may be chosen
again without another calibration. Knows nothing of files and residents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lowtide.core import FloatArray, IntArray, WeightArray
from lowtide.errors import UsageError
from lowtide.policies.buddy_lists import (
    SMOOTHING,
    BuddyLists,
    BuddyRule,
    Ranking,
    fitted_alphas,
    lists_of,
)


@dataclass(frozen=True, slots=True, eq=False)
class QualityCurve:
    """What replacing router mass did to a model's words: measured on one text, elsewhere an
    estimate.

    `mass` ascends from above 0 to 1 at most, `kl` is nowhere negative, both are as long and not
    empty; else UsageError.
    """

    mass: FloatArray  # [points] replaced weight over routed weight, in (0, 1]
    kl: FloatArray  # [points] mean KL(exact || substituted) of a token, in nats
    text_sha256: str  # of the text that it was measured on

    def __post_init__(self) -> None:
        mass, kl = self.mass, self.kl
        has_shape = mass.ndim == 1 and mass.shape == kl.shape and len(mass) > 0
        is_mass = has_shape and (np.diff(mass, prepend=0) > 0).all() and mass[-1] <= 1
        if not is_mass or not (np.isfinite(kl) & (kl >= 0)).all():
            raise UsageError(
                "A quality curve has masses that ascend from above 0 to at most 1, and for each a "
                f"KL that is finite and not negative; not {mass.tolist()} and {kl.tolist()}."
            )

    def max_mass(self, max_kl: float) -> float:
        """The most mass whose estimated KL is at most `max_kl`; never beyond what was measured.

        Straight lines through no harm at no mass and the measured points; where the curve falls,
        what lies below counts as high as the highest so far. Raises UsageError for a KL that is
        not at least 0.
        """
        if not max_kl >= 0:
            raise UsageError(f"max_kl must be at least 0, not {max_kl:g}: it is in nats.")
        mass = np.concatenate([[0.0], self.mass])
        kl = np.maximum.accumulate(np.concatenate([[0.0], self.kl]))
        if max_kl >= kl[-1]:
            return float(mass[-1])
        above = int(np.searchsorted(kl, max_kl, side="right"))  # the first point above
        low, high = kl[above - 1], kl[above]
        share = (max_kl - low) / (high - low)
        return float(mass[above - 1] + share * (mass[above] - mass[above - 1]))

    def kl_of(self, mass: float) -> float:
        """The estimate for a mass; infinite beyond what was measured."""
        if mass > self.mass[-1]:
            return float(np.inf)
        kl = np.maximum.accumulate(np.concatenate([[0.0], self.kl]))
        return float(np.interp(mass, np.concatenate([[0.0], self.mass]), kl))


@dataclass(frozen=True, slots=True, eq=False)
class BuddyProfile:
    """Statistics of a router on one text, for every MoE layer.

    Raises UsageError when they contradict each other, or for a layer without activity.
    """

    fingerprint: str
    """Identifies the weights, and so models that differ in nothing else (`LLM.fingerprint`)."""
    num_tokens: int  # rows that were routed, each by every layer
    activations: IntArray  # [layers, experts] A(i): tokens that chose i
    together: IntArray  # [layers, experts, experts] M(i, j): tokens that chose both; M(i, i) = 0
    together_weight: WeightArray  # the same, each token by the smaller of its two weights
    # [layers, tokens, k] weights of an even sample of tokens, descending and summing to 1
    sample: WeightArray
    # [layers, experts, experts] mean cosine of two experts' outputs on the same inputs
    output_similarity: WeightArray | None = None
    weight_similarity: WeightArray | None = None  # the same of their weights
    rule: BuddyRule = field(default_factory=BuddyRule)  # that the calibration was asked for
    curve: QualityCurve | None = None  # what `lowtide quality` measured

    def __post_init__(self) -> None:
        _check_shapes(self)
        _check_counts(self)
        self.rule.check(self.num_layers)
        self.similarity(self.rule.ranking)

    @property
    def num_layers(self) -> int:
        return len(self.together)

    @property
    def num_experts(self) -> int:
        return len(self.together[0])

    @property
    def num_experts_per_token(self) -> int:
        return len(self.sample[0, 0])

    def check(self, fingerprint: str, where: str) -> None:
        """Raises UsageError for weights that this is not a profile of; `where`: its file."""
        if self.fingerprint != fingerprint:
            raise UsageError(
                f"The buddy profile in {where} is another model's: of the same shape and with "
                f"other weights ({self.fingerprint[:12]}, and these are {fingerprint[:12]}); "
                "delete it or give another --calibration, and run lowtide calibrate --buddies."
            )

    def lists(self, rule: BuddyRule | None = None) -> BuddyLists:
        """The buddies of every expert by a rule, or by the calibration's.

        Raises UsageError for a rule that cannot be, or that ranks by what was not measured.
        """
        rule = rule or self.rule
        return lists_of(self.q(rule.ranking, rule.smoothing), rule, self.similarity(rule.ranking))

    def q(
        self, ranking: Ranking = Ranking.CO_ACTIVATION, smoothing: float = SMOOTHING
    ) -> FloatArray:
        """q(j|i) as [layers, i, j] (Eq. 4), smoothed; rows of experts never seen are 0.

        By weight for `Ranking.WEIGHTED`, where smoothing adds so many co-activations of the
        layer's mean weight; by number for all others.
        """
        counts = self.together.astype(np.float64)
        if ranking is Ranking.WEIGHTED:
            pairs = counts.sum(axis=(1, 2))
            counts = self.together_weight.astype(np.float64)
            smoothing = smoothing * (counts.sum(axis=(1, 2)) / pairs)[:, None, None]
        smoothed = (counts + smoothing) * ~np.eye(self.num_experts, dtype=bool)
        smoothed = smoothed * (self.activations > 0)[:, :, None]
        total = smoothed.sum(axis=2, keepdims=True)
        q: FloatArray = np.divide(smoothed, total, out=np.zeros_like(smoothed), where=total > 0)
        return q

    def similarity(self, ranking: Ranking) -> WeightArray | None:
        """What sorts lists again under this ranking, if anything. Raises UsageError where that was
        not measured."""
        measured = {
            Ranking.OUTPUTS: self.output_similarity,
            Ranking.WEIGHTS: self.weight_similarity,
        }
        if ranking in measured and measured[ranking] is None:
            raise UsageError(
                f"This profile cannot rank by {ranking.value}, which was not measured; run lowtide "
                f"calibrate --buddies --similarity {ranking.value}."
            )
        return measured.get(ranking)

    def fitted_to(self, list_size: float, rule: BuddyRule) -> BuddyRule:
        """The rule with each layer's greatest alpha whose lists have `list_size` buddies in the
        mean, at most, before they are cut. Raises UsageError for a size that cannot be."""
        return replace(rule, alpha=fitted_alphas(self.q(rule.ranking, rule.smoothing), list_size))

    def entropy_threshold(self, percentile: float, temperature: float = 1.0) -> FloatArray:
        """The TAE (Eq. 1) below which so many percent of the sample's tokens lie. [layers]"""
        if not 0 <= percentile <= 100:
            raise UsageError(f"A percentile is from 0 to 100, not {percentile:g}.")
        return np.percentile(token_entropy(self.sample, temperature), percentile, axis=1)

    def concentration(self) -> FloatArray:
        """How few peers an expert's co-activations fall on. [layers]

        1 - H(q(.|i)) / log(experts - 1), without smoothing, in the mean over experts weighed by
        their co-activations: 0 where all peers are alike, 1 where each expert has one.
        """
        return self._mean_of_experts(1 - _shannon(self._plain_q()) / np.log(self.num_experts - 1))

    def affinity(self) -> FloatArray:
        """What co-activation says beyond popularity, in nats. [layers]

        KL of q(.|i) from the distribution that popularity alone would give, in the mean over
        experts: near 0 where experts come together as often as they come at all, and then the
        buddies of all experts are the same popular ones. A short text makes it greater.
        """
        popularity = self.activations / self.activations.sum(axis=1, keepdims=True)
        expected = popularity[:, None, :] * ~np.eye(self.num_experts, dtype=bool)
        expected = expected / expected.sum(axis=2, keepdims=True).clip(min=1e-300)
        q = self._plain_q()
        ratio = np.divide(q, expected, out=np.ones_like(q), where=(q > 0) & (expected > 0))
        return self._mean_of_experts((q * np.log(ratio)).sum(axis=2))

    def _plain_q(self) -> FloatArray:
        return self.q(smoothing=0.0)

    def _mean_of_experts(self, values: FloatArray) -> FloatArray:
        """[layers, experts] -> [layers], each expert by its co-activations."""
        mass = self.together.sum(axis=2)
        mean: FloatArray = (values * mass).sum(axis=1) / mass.sum(axis=1)
        return mean


def token_entropy(weights: NDArray[np.floating], temperature: float = 1.0) -> FloatArray:
    """Token activating entropy (TAE, Eq. 1) of each token, in [0, 1].

    weights [..., k]: of a token's chosen experts, not negative, of any positive sum; p is
    weights^(1/temperature), summing to 1. One expert per token has no entropy. Raises UsageError
    for a temperature that is not above 0.
    """
    if not 0 < temperature < np.inf:
        raise UsageError(f"temperature must be above 0, not {temperature:g}.")
    p = weights.astype(np.float64)
    p = (p / p.max(axis=-1, keepdims=True)) ** (1 / temperature)
    share: FloatArray = _shannon(p / p.sum(axis=-1, keepdims=True)) / np.log(max(2, p.shape[-1]))
    return share.clip(0, 1)  # rounding may add a little


def _shannon(p: FloatArray) -> FloatArray:
    """-sum p log p over the last axis, in nats."""
    logs = np.log(p, out=np.zeros_like(p), where=p > 0)
    entropies: FloatArray = -(p * logs).sum(axis=-1)
    return entropies


def _check_shapes(profile: BuddyProfile) -> None:
    layers, experts = (*profile.together.shape, 0, 0)[:2]
    k = (*profile.sample.shape, 0, 0, 0)[2]
    if layers < 1 or experts < 3:
        raise UsageError(f"A buddy profile of {layers} layers of {experts} experts cannot be.")
    if k < 2:
        raise UsageError(
            f"Buddies are experts that a token chooses together, and this router chooses {k} "
            "per token."
        )
    pairs = (layers, experts, experts)
    shapes: Sequence[tuple[str, NDArray[np.generic] | None, tuple[int, ...]]] = (
        ("activations", profile.activations, (layers, experts)),
        ("together", profile.together, pairs),
        ("together_weight", profile.together_weight, pairs),
        ("output_similarity", profile.output_similarity, pairs),
        ("weight_similarity", profile.weight_similarity, pairs),
        ("sample", profile.sample, (layers, max(1, profile.sample.shape[1]), k)),
    )
    for name, array, shape in shapes:
        if array is not None and array.shape != shape:
            raise UsageError(f"A buddy profile's {name} has shape {array.shape}, not {shape}.")


def _check_counts(profile: BuddyProfile) -> None:
    chosen = profile.activations.sum(axis=1)
    for layer, count in enumerate(chosen.tolist()):
        if count == 0:
            raise UsageError(
                f"MoE layer {layer} of the buddy profile has no activity: no token of its text "
                "was routed there; calibrate again, on more text."
            )
    k = profile.sample.shape[2]
    is_counted = (
        (chosen == profile.num_tokens * k).all()
        and (profile.together == profile.together.transpose(0, 2, 1)).all()
        and not np.diagonal(profile.together, axis1=1, axis2=2).any()
        and (profile.together >= 0).all()
        and (profile.together.sum(axis=2) == (k - 1) * profile.activations).all()
        and (profile.together_weight >= 0).all()
        and (profile.together_weight <= profile.together).all()
    )
    if not is_counted:
        raise UsageError(
            "A buddy profile's counts contradict each other; run lowtide calibrate --buddies again."
        )
