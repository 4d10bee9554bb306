"""Buddies: which experts can replace which, from a calibration's routing (BuddyMoE, 3.2, 3.3).

    lists = profile.lists(alpha=0.95, k_max=16)
    lists[layer, expert]  # buddies, best first, then -1

Counts are stored, and lists are made from them on demand, so that `alpha` and `k_max` can be
options of a policy. Knows nothing of files and residents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from lowtide.core import FloatArray, IntArray, WeightArray
from lowtide.errors import UsageError

SMOOTHING = 1
"""Laplace's smoothing: added to the co-activations of every pair. The paper gives no value."""
WEIGHT_UNIT = 1 << 20
"""Weighted co-activations are whole numbers of this part of a token, so that sums are exact."""
DEFAULT_ALPHA = 0.95
DEFAULT_K_MAX = 16
MAX_K_MAX = 64
"""Longest list of buddies; the paper uses 5 to 20."""


@dataclass(frozen=True, slots=True, eq=False)
class QualityCurve:
    """Measured change of a model's words by replaced router mass, on one text.

    On other texts it is an estimate. `mass` ascends within (0, 1], `kl` is not negative; both have
    the same length, at least 1. Otherwise raises UsageError.
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
        """Return the most mass with an estimated KL of at most `max_kl`, within the measurements.

        Interpolates linearly from (0, 0) through the measured points; where the curve falls, the
        highest value so far is used. Raises UsageError for a negative KL.
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


@dataclass(frozen=True, slots=True, eq=False)
class BuddyProfile:
    """Routing statistics of one text, for every MoE layer.

    Raises UsageError if they contradict each other, or for a layer without activity.
    """

    fingerprint: str
    """Identifies the weights, for models that differ in nothing else (`LLM.fingerprint`)."""
    num_tokens: int  # rows that were routed, each by every layer
    activations: IntArray  # [layers, experts] A(i): tokens that chose i
    together: IntArray  # [layers, experts, experts] M(i, j): tokens that chose both; M(i, i) = 0
    # [layers, tokens, k] weights of an even sample of tokens, descending and summing to 1
    sample: WeightArray
    curve: QualityCurve | None = None  # what `lowtide quality` measured
    # [layers, experts, experts]: as `together`, each token by the lesser of its two weights, in
    # `WEIGHT_UNIT`s; where they were asked for, q is theirs
    weighted: IntArray | None = None
    temperature: float = 1.0  # that smooths weights before their entropy is taken
    alphas: FloatArray | None = None  # [layers] shares that buddies cover, where none is asked for

    def __post_init__(self) -> None:
        _check_shapes(self)
        _check_counts(self)
        _check_choices(self)

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
        """Raise UsageError if this is a profile of other weights; `where`: its file."""
        if self.fingerprint != fingerprint:
            raise UsageError(
                f"The buddy profile in {where} is another model's: of the same shape and with "
                f"other weights ({self.fingerprint[:12]}, and these are {fingerprint[:12]}); "
                "delete it or give another `calibration`, and run lowtide calibrate --buddies."
            )

    def lists(self, alpha: float | None = None, k_max: int = DEFAULT_K_MAX) -> NDArray[np.int32]:
        """Return every expert's buddies, best first, then -1: [layers, experts, length].

        The paper's cumulative frequency threshold (CFT, Eqs. 5 and 6): the shortest prefix of an
        expert's peers, sorted by q, that covers a share alpha of its co-activations, cut at
        `k_max`. An expert that the calibration never saw has none. Without alpha each layer has its
        own, or the default.
        """
        peers, lengths = self._prefixes(alpha)
        width = min(k_max, peers.shape[2])
        is_listed = np.arange(width) < lengths[:, :, None]
        return np.where(is_listed, peers[:, :, :width], -1).astype(np.int32)

    def alpha_of_layers(self, alpha: float | None = None) -> list[float]:
        """Return the share that buddies cover in each layer: `alpha`, or the profile's own."""
        if alpha is None and self.alphas is not None:
            return [float(own) for own in self.alphas]
        return [DEFAULT_ALPHA if alpha is None else alpha] * self.num_layers

    def peers_that_cover(self, alpha: float | None = None) -> IntArray:
        """Count the peers of every expert that cover a share alpha, before lists are cut.

        Returns [layers, experts].
        """
        return self._prefixes(alpha)[1]

    def _prefixes(self, alpha: float | None) -> tuple[IntArray, IntArray]:
        """Return peers by q, ties by id [layers, experts, experts - 1], and counts for alpha."""
        counts = self._smoothed(SMOOTHING)
        masked = np.where(np.eye(self.num_experts, dtype=bool), -1, counts)
        peers = np.argsort(-masked, axis=2, kind="stable")[:, :, :-1]
        covered = np.take_along_axis(counts, peers, 2).cumsum(axis=2)
        total = covered[:, :, -1]
        pairs = zip(total, self.alpha_of_layers(alpha), strict=True)
        needed = np.array([_share_of(of_layer, share) for of_layer, share in pairs])
        reaches = covered >= needed[:, :, None]
        return peers, np.where(total > 0, reaches.argmax(axis=2) + 1, 0)

    def _smoothed(self, smoothing: int) -> IntArray:
        """Return smoothed co-activations [layers, i, j]; 0 for experts never seen, and at i = j."""
        is_pair = ~np.eye(self.num_experts, dtype=bool) & (self.activations > 0)[:, :, None]
        if self.weighted is None:
            return (self.together + smoothing) * is_pair
        return (self.weighted + smoothing * WEIGHT_UNIT) * is_pair

    def q(self, smoothing: int = SMOOTHING) -> FloatArray:
        """Return q(j|i) as [layers, i, j] (Eq. 4), smoothed; rows of experts never seen are 0."""
        smoothed = self._smoothed(smoothing).astype(np.float64)
        total = smoothed.sum(axis=2, keepdims=True)
        q: FloatArray = np.divide(smoothed, total, out=np.zeros_like(smoothed), where=total > 0)
        return q

    def entropy_threshold(self, percentile: float) -> FloatArray:
        """Return the TAE (Eq. 1) below which `percentile` percent of the tokens lie, [layers]."""
        entropy = token_entropy(self.sample, self.temperature)
        return np.percentile(entropy, percentile, axis=1)

    def concentration(self) -> FloatArray:
        """Return the concentration of experts' co-activations on few peers, [layers].

        1 - H(q(.|i)) / log(experts - 1), without smoothing, averaged over experts weighted by their
        co-activations: 0 if all peers are alike, 1 if each expert has one.
        """
        plain = self.q(smoothing=0)
        return self._mean_of_experts(1 - _shannon(plain) / np.log(self.num_experts - 1))

    def affinity(self) -> FloatArray:
        """Return the information in co-activations beyond popularity, in nats, [layers].

        The KL divergence of q(.|i) from the distribution by popularity alone, averaged over
        experts. Near 0 the buddies of all experts are the same popular ones. A short text increases
        it.
        """
        popularity = self.activations / self.activations.sum(axis=1, keepdims=True)
        expected = popularity[:, None, :] * ~np.eye(self.num_experts, dtype=bool)
        expected = expected / expected.sum(axis=2, keepdims=True).clip(min=1e-300)
        q = self.q(smoothing=0)
        ratio = np.divide(q, expected, out=np.ones_like(q), where=(q > 0) & (expected > 0))
        return self._mean_of_experts((q * np.log(ratio)).sum(axis=2))

    def top_peers(self, num_peers: int) -> FloatArray:
        """Return the share of co-activations with an expert's first `num_peers` peers: [layers]."""
        q = -np.sort(-self.q(smoothing=0), axis=2)[:, :, :num_peers].sum(axis=2)
        return self._mean_of_experts(q)

    def _mean_of_experts(self, values: FloatArray) -> FloatArray:
        """Average [layers, experts] to [layers], weighting each expert by its co-activations."""
        mass = self.together.sum(axis=2)
        mean: FloatArray = (values * mass).sum(axis=1) / mass.sum(axis=1)
        return mean


def token_entropy(weights: NDArray[np.floating], temperature: float = 1.0) -> FloatArray:
    """Return the token activating entropy (TAE, Eq. 1) of each token, in [0, 1].

    weights [..., k]: of a token's chosen experts, not negative, of any positive sum. With one
    expert per token it is 0. temperature: as of softmax(logits / temperature) over the chosen.
    """
    p = weights.astype(np.float64)
    p = p / p.max(axis=-1, keepdims=True)
    if temperature != 1:
        p = p ** (1 / temperature)
    share: FloatArray = _shannon(p / p.sum(axis=-1, keepdims=True)) / np.log(max(2, p.shape[-1]))
    return share.clip(0, 1)  # rounding may add a little


def _share_of(totals: IntArray, share: float) -> IntArray:
    """Return the least whole numbers that are at least a share of each of `totals`.

    The share is the decimal that it was written as: 0.95 is 19 of 20, not the nearest float.
    """
    part = Fraction(repr(float(share)))
    return np.array([-(-part.numerator * n // part.denominator) for n in totals.tolist()])


def _shannon(p: FloatArray) -> FloatArray:
    """Return -sum p log p over the last axis, in nats."""
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
    shapes: Sequence[tuple[str, NDArray[np.generic], tuple[int, ...]]] = (
        ("activations", profile.activations, (layers, experts)),
        ("together", profile.together, (layers, experts, experts)),
        ("sample", profile.sample, (layers, max(1, profile.sample.shape[1]), k)),
    )
    for name, array, shape in shapes:
        if array.shape != shape:
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
    )
    if not is_counted:
        raise UsageError(
            "A buddy profile's counts contradict each other; run lowtide calibrate --buddies again."
        )


def _check_choices(profile: BuddyProfile) -> None:
    """Check what `calibrate` was asked for."""
    weighted, alphas, temperature = profile.weighted, profile.alphas, profile.temperature
    if weighted is not None and (
        weighted.shape != profile.together.shape
        or (weighted != weighted.transpose(0, 2, 1)).any()
        or (weighted < 0).any()
        or (weighted > profile.together * WEIGHT_UNIT).any()
    ):
        raise UsageError("A buddy profile's weighted counts contradict its counts.")
    if not (np.isfinite(temperature) and temperature > 0):
        raise UsageError(f"The temperature of weights must be above 0, not {temperature:g}.")
    if alphas is not None and (
        alphas.shape != (profile.num_layers,) or not ((alphas > 0) & (alphas <= 1)).all()
    ):
        raise UsageError(
            f"Shares of co-activations are one for each of {profile.num_layers} MoE layers, above "
            f"0 to 1, not {alphas.tolist()}."
        )
