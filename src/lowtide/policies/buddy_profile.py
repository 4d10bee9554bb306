"""Buddies: which experts can replace which, from a calibration's routing (BuddyMoE, 3.2, 3.3).

    lists = profile.lists(alpha=0.95, k_max=16)
    lists[layer, expert]  # buddies, best first, then -1

Counts are stored, and lists are made from them on demand, so that `alpha` and `k_max` can be
options of a policy. Knows nothing of files and residents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.core import FloatArray, IntArray, WeightArray
from lowtide.errors import UsageError

SMOOTHING = 1.0
"""Laplace's smoothing: added to the co-activations of every pair. The paper gives no value."""
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

    def __post_init__(self) -> None:
        _check_shapes(self)
        _check_counts(self)

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
                "delete it or give another --calibration, and run lowtide calibrate --buddies."
            )

    def lists(self, alpha: float = DEFAULT_ALPHA, k_max: int = DEFAULT_K_MAX) -> NDArray[np.int32]:
        """Return every expert's buddies, best first, then -1: [layers, experts, length].

        The paper's cumulative frequency threshold (CFT, Eqs. 5 and 6): the shortest prefix of an
        expert's peers, sorted by q, that covers a share alpha of its co-activations, cut at
        `k_max`. An expert that the calibration never saw has none.
        """
        peers, lengths = self._prefixes(alpha)
        width = min(k_max, peers.shape[2])
        is_listed = np.arange(width) < lengths[:, :, None]
        return np.where(is_listed, peers[:, :, :width], -1).astype(np.int32)

    def peers_that_cover(self, alpha: float) -> IntArray:
        """Return how many peers of every expert cover a share alpha, before lists are cut.

        [layers, experts]
        """
        return self._prefixes(alpha)[1]

    def _prefixes(self, alpha: float) -> tuple[IntArray, IntArray]:
        """Return peers by q, ties by id [layers, experts, experts - 1]; how many reach alpha."""
        q = self.q()
        masked = np.where(np.eye(self.num_experts, dtype=bool), -1.0, q)
        peers = np.argsort(-masked, axis=2, kind="stable")[:, :, :-1]
        covered = np.take_along_axis(q, peers, 2).cumsum(axis=2)
        total = covered[:, :, -1:]
        # A share of the total as it was summed, so that the last peer covers exactly all of it.
        reaches = covered >= alpha * total
        return peers, np.where(total[:, :, 0] > 0, reaches.argmax(axis=2) + 1, 0)

    def q(self, smoothing: float = SMOOTHING) -> FloatArray:
        """Return q(j|i) as [layers, i, j] (Eq. 4), smoothed; rows of experts never seen are 0."""
        smoothed = (self.together.astype(np.float64) + smoothing) * ~np.eye(
            self.num_experts, dtype=bool
        )
        smoothed = smoothed * (self.activations > 0)[:, :, None]
        total = smoothed.sum(axis=2, keepdims=True)
        q: FloatArray = np.divide(smoothed, total, out=np.zeros_like(smoothed), where=total > 0)
        return q

    def entropy_threshold(self, percentile: float) -> FloatArray:
        """Return the TAE (Eq. 1) below which `percentile` percent of the tokens lie, [layers]."""
        return np.percentile(token_entropy(self.sample), percentile, axis=1)

    def concentration(self) -> FloatArray:
        """Return how concentrated experts' co-activations are on few peers, [layers].

        1 - H(q(.|i)) / log(experts - 1), without smoothing, averaged over experts weighted by their
        co-activations: 0 if all peers are alike, 1 if each expert has one.
        """
        plain = self.q(smoothing=0.0)
        return self._mean_of_experts(1 - _shannon(plain) / np.log(self.num_experts - 1))

    def affinity(self) -> FloatArray:
        """Return how much co-activation says beyond popularity, in nats, [layers].

        The KL divergence of q(.|i) from the distribution by popularity alone, averaged over
        experts. Near 0 the buddies of all experts are the same popular ones. A short text increases
        it.
        """
        popularity = self.activations / self.activations.sum(axis=1, keepdims=True)
        expected = popularity[:, None, :] * ~np.eye(self.num_experts, dtype=bool)
        expected = expected / expected.sum(axis=2, keepdims=True).clip(min=1e-300)
        q = self.q(smoothing=0.0)
        ratio = np.divide(q, expected, out=np.ones_like(q), where=(q > 0) & (expected > 0))
        return self._mean_of_experts((q * np.log(ratio)).sum(axis=2))

    def top_peers(self, num_peers: int) -> FloatArray:
        """Return the share of co-activations with an expert's first `num_peers` peers: [layers]."""
        q = -np.sort(-self.q(smoothing=0.0), axis=2)[:, :, :num_peers].sum(axis=2)
        return self._mean_of_experts(q)

    def _mean_of_experts(self, values: FloatArray) -> FloatArray:
        """Average [layers, experts] to [layers], weighting each expert by its co-activations."""
        mass = self.together.sum(axis=2)
        mean: FloatArray = (values * mass).sum(axis=1) / mass.sum(axis=1)
        return mean


def token_entropy(weights: NDArray[np.floating]) -> FloatArray:
    """Return the token activating entropy (TAE, Eq. 1) of each token, in [0, 1].

    weights [..., k]: of a token's chosen experts, not negative, of any positive sum. With one
    expert per token it is 0.
    """
    p = weights.astype(np.float64)
    p = p / p.max(axis=-1, keepdims=True)
    share: FloatArray = _shannon(p / p.sum(axis=-1, keepdims=True)) / np.log(max(2, p.shape[-1]))
    return share.clip(0, 1)  # rounding may add a little


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
