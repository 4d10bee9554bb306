"""BuddyMoE's gates: which tokens may have experts replaced, and whether a layer may at all.

In the paper's order (3.1): a token's activating entropy and margin, then the layer's share of
absent experts. Before both, ours: rows whose outcome lasts are exact unless asked otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.buddies import TokenGates
from lowtide.core import (
    BoolArray,
    Facts,
    FloatArray,
    IntArray,
    RoutedTokens,
    RowKind,
    WeightArray,
)
from lowtide.policies.buddy_lists import BuddyLists
from lowtide.policies.buddy_profile import token_entropy

_SLACK = 1e-12
"""The slack of entropies and margins: sums of the same weights in another order differ by less."""


@dataclass(frozen=True, slots=True, eq=False)
class Gates:
    """What has to be so for a token, and for a layer, to have experts replaced.

    entropies [layers]: TAE of a token at most this forbids it (its tau); temperature: of the TAE;
    margin: as much between a token's best and second best p forbids it, too (its gamma); beta: an
    absent share of the requested experts that is at least this forbids the whole layer.
    in_prefill, in_commit: whether rows of prompts, and rows that only put a diffusion block's
    final tokens into the KV cache, may be touched.
    """

    entropies: FloatArray | None = None
    temperature: float = 1.0
    margin: float | None = None
    beta: float | None = None
    in_prefill: bool = False
    in_commit: bool = False

    def of_layer(self, layer: int) -> TokenGates:
        """The same for one layer."""
        is_exact = {RowKind.PROMPT: not self.in_prefill, RowKind.COMMIT: not self.in_commit}
        return TokenGates(
            sum(1 << kind for kind, is_so in is_exact.items() if is_so),
            self.temperature,
            -1.0 if self.entropies is None else float(self.entropies[layer]),
            np.inf if self.margin is None else self.margin,
            np.inf if self.beta is None else self.beta,
        )

    def open_tokens(self, facts: Facts, routing: RoutedTokens) -> BoolArray:
        """Tokens that may have experts replaced, and whose device is not closed. [tokens]"""
        share = 0.0 if self.beta is None else absent_shares(facts, routing)
        kinds = facts.step.rows_of(len(routing.weights)).kind
        return open_tokens(self.of_layer(facts.layer), kinds, routing.weights, share)


def open_tokens(
    gates: TokenGates,
    kinds: NDArray[np.uint8],
    weights: WeightArray,
    absent_share: FloatArray | float,
) -> BoolArray:
    """Tokens that may have experts replaced, of rows of these kinds; absent_share: of the experts
    requested, for every token or for each. [tokens]"""
    is_open: BoolArray = (gates.exact_kinds >> kinds.astype(np.int64)) & 1 == 0
    if gates.entropy >= 0:
        is_open &= token_entropy(weights, gates.temperature) > gates.entropy + _SLACK
    if np.isfinite(gates.margin):
        is_open &= token_margins(weights) < gates.margin - _SLACK
    return is_open & (np.asarray(absent_share) < gates.beta)


def absent_experts(facts: Facts) -> BoolArray:
    """Experts that are asked for and neither here nor on their way: what there is to save.

    [num_experts]
    """
    demand = facts.demand
    is_absent = ~demand.is_resident
    if facts.arriving_s is not None:
        is_absent = is_absent & np.isinf(facts.arriving_s)
    absent = np.zeros(len(facts.is_kept), np.bool_)
    absent[demand.experts] = is_absent
    return absent


def absent_shares(facts: Facts, routing: RoutedTokens) -> FloatArray:
    """The share of the layer's requested experts that is absent (Eq. 2), for each token."""
    share = np.count_nonzero(absent_experts(facts)) / max(1, len(facts.demand.experts))
    return np.full(len(routing.weights), share)


def token_margins(weights: WeightArray) -> FloatArray:
    """What lies between a token's best and second best p, its weights made to sum to 1. [tokens]"""
    if weights.shape[1] < 2:
        return np.ones(len(weights))
    best = -np.partition(-weights.astype(np.float64), 1, axis=1)
    margins: FloatArray = (best[:, 0] - best[:, 1]) / weights.sum(axis=1, dtype=np.float64)
    return margins


@dataclass(frozen=True, slots=True)
class Psi:
    """What else than q decides which buddy comes first (Eq. 3).

    Psi(j|i, x) = q(j|i) * (1 + eta * z(j, x)), where z is the router's logit less its mean over
    the layer's experts, in standard deviations. The paper's third factor is of several devices.
    """

    eta: float = 0.0

    @property
    def is_used(self) -> bool:
        return self.eta > 0

    def scores(
        self, q: FloatArray, buddies: IntArray, facts: Facts, routing: RoutedTokens
    ) -> FloatArray:
        """Psi of each pair's buddies; q, buddies [tokens, k, length], -1 behind the last."""
        psi = q
        tokens = np.arange(len(buddies))[:, None, None]
        if self.eta and routing.scores is not None:
            logits = routing.scores.astype(np.float64)
            deviation = logits.std(axis=1, keepdims=True)
            z = (logits - logits.mean(axis=1, keepdims=True)) / deviation.clip(1e-12)
            psi = psi * (1 + self.eta * z[tokens, buddies])
        return psi

    def lists(
        self, buddies_of: BuddyLists, facts: Facts, routing: RoutedTokens
    ) -> NDArray[np.int32]:
        """Each pair's own list, best first by Psi. [pairs, length]"""
        buddies = buddies_of.ids[facts.layer][routing.experts].astype(np.int64)
        q = buddies_of.q[facts.layer][routing.experts].astype(np.float64)
        score = self.scores(q, buddies, facts, routing)
        order = np.argsort(-np.where(buddies < 0, -np.inf, score), axis=2, kind="stable")
        own = np.take_along_axis(buddies, order, 2).astype(np.int32)
        return np.ascontiguousarray(own.reshape(routing.experts.size, -1))
