"""Miss policies: what becomes of tokens whose experts are absent, other than that they wait.

All of them answer another routing and keep a replaced expert's weight for its stand-in. An
expert that is on its way already is not absent, and none is replaced beyond what a request may
have moved. `RandomBuddy`, `Drop` and `CachePrior` are baselines; what gives up only the experts
that come too late is in `late.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.random import default_rng

from lowtide.buddies import BuddyTwins, LayerRules, LayerState, LayerTwin, PassAccount
from lowtide.core import (
    BoolArray,
    Facts,
    FloatArray,
    IntArray,
    Left,
    RoutedTokens,
    Step,
    WeightArray,
)
from lowtide.policies.buddy_gates import Gates, Psi, absent_experts
from lowtide.policies.buddy_lists import BuddyLists
from lowtide.policies.buddy_search import UNBOUNDED
from lowtide.policies.plain_buddies import PlainBuddies
from lowtide.policies.substitution import CountedSubstitution, answer_of, in_order


@dataclass(frozen=True, slots=True)
class Rho:
    """The budget of substitutions of one token: a number of experts, or half of those it has."""

    num_experts: int | None = None  # None: half of a token's, at least one

    def of(self, num_chosen: int) -> int:
        return max(1, num_chosen // 2) if self.num_experts is None else self.num_experts


class Buddy(CountedSubstitution):
    """BuddyMoE: an absent expert's first buddy that is here (Algorithm 1), gates permitting.

    step_bytes: ours, since a `beta` caps no bytes: of the experts that are absent only so many are
    replaced, those of least router mass first, that what is left to read or fetch fits what the
    pass may still move.
    """

    def __init__(
        self,
        lists: BuddyLists,
        gates: Gates,
        psi: Psi,
        rho: Rho,
        search_rank: int = UNBOUNDED,
        step_bytes: int | None = None,
        twins: BuddyTwins | None = None,
    ) -> None:
        self._layers = LayerTwins(lists, gates, psi, rho, search_rank, twins)
        self._meter = None if step_bytes is None else Meter(step_bytes, len(lists.ids))

    def counted(self, facts: Facts, account: PassAccount | None) -> RoutedTokens | None:
        if facts.routing is None:
            return None
        num_fit = 0
        if self._meter is not None:
            num_fit = self._meter.num_fit(facts, int(np.count_nonzero(absent_experts(facts))))
        state = self._layers.state(facts, facts.routing, account)
        return self._layers.of(facts.layer).replace_absent(state, num_fit)


class LayerTwins:
    """A model's layers, each with what decides in it, and what that is told of a pass."""

    def __init__(
        self,
        lists: BuddyLists,
        gates: Gates,
        psi: Psi,
        rho: Rho,
        search_rank: int = UNBOUNDED,
        twins: BuddyTwins | None = None,
    ) -> None:
        """twins: the plain ones unless they are given."""
        self._lists = lists
        self._gates = gates
        self._psi = psi
        self._rho = rho
        made = PlainBuddies() if twins is None else twins
        self._layers = [
            made.of_layer(LayerRules(ids, search_rank, gates.of_layer(layer), layer))
            for layer, ids in enumerate(lists.ids)
        ]

    def of(self, layer: int) -> LayerTwin:
        return self._layers[layer]

    def state(
        self, facts: Facts, routing: RoutedTokens, account: PassAccount | None = None
    ) -> LayerState:
        """Psi ranks buddies here: few ask for that."""
        experts, weights, _ = routing
        owner, left = (None, None) if facts.left is None else facts.left
        asks_psi = self._psi.is_used and not facts.demand.is_resident.all()
        return LayerState(
            experts,
            weights,
            facts.step.rows_of(len(weights)).kind,
            who_is_here(facts),
            facts.arriving_s,
            self._psi.lists(self._lists, facts, routing) if asks_psi else None,
            owner,
            left,
            self._rho.of(experts.shape[1]),
            account,
        )


class Meter:
    """What a pass may still read or fetch, shared by the layers that are left. It is not asked of
    a layer whose experts are all resident, be it a pass's first."""

    def __init__(self, step_bytes: int, num_layers: int) -> None:
        self._step_bytes = step_bytes
        self._num_layers = num_layers
        self._left_bytes = float(step_bytes)
        self._step: Step | None = None
        self._last_layer = num_layers

    def num_fit(self, facts: Facts, num_absent: int) -> int:
        """How many of the layer's absent experts its share of the step's bytes has room for."""
        if facts.step is not self._step or facts.layer <= self._last_layer:
            self._left_bytes = float(self._step_bytes)
        self._step, self._last_layer = facts.step, facts.layer
        share_bytes = self._left_bytes / (self._num_layers - facts.layer)
        num_fit = min(num_absent, int(share_bytes // facts.costs.expert_bytes))
        self._left_bytes -= num_fit * facts.costs.expert_bytes
        return num_fit


class RandomBuddy:
    """A baseline: any resident outside the token's experts, drawn from a seed."""

    def __init__(self, gates: Gates, rho: Rho, seed: int = 0) -> None:
        self._gates = gates
        self._rho = rho
        self._draw = default_rng(seed)

    def __call__(self, facts: Facts) -> RoutedTokens | None:
        def stand_in(others: IntArray) -> int:
            return int(self._draw.choice(others))

        return _replace_by_rank(facts, self._gates, self._rho, stand_in)


class Drop:
    """A baseline: an absent expert adds nothing, and the other weights stay as they are.

    A token has k experts for all that comes after: a resident of weight 0 takes the place.
    """

    def __init__(self, gates: Gates, rho: Rho) -> None:
        self._gates = gates
        self._rho = rho

    def __call__(self, facts: Facts) -> RoutedTokens | None:
        def stand_in(others: IntArray) -> int:
            return int(others[0])

        return _replace_by_rank(facts, self._gates, self._rho, stand_in, keeps_weight=False)


@dataclass(frozen=True, slots=True)
class Weighing:
    """How a router makes weights of the logits of the experts that it chose."""

    is_sigmoid: bool
    normalise: bool
    scaling_factor: float

    def weights(self, logits: FloatArray, chosen: IntArray) -> WeightArray:
        """logits [tokens, experts], chosen [tokens, k] -> [tokens, k]"""
        if self.is_sigmoid:
            score = 1 / (1 + np.exp(-logits))
        else:
            score = np.exp(logits - logits.max(axis=1, keepdims=True))
            score /= score.sum(axis=1, keepdims=True)
        weights = np.take_along_axis(score, chosen, 1)
        if self.normalise:
            weights /= weights.sum(axis=1, keepdims=True) + 1e-20
        scaled: WeightArray = (weights * self.scaling_factor).astype(np.float32)
        return scaled


class CachePrior:
    """A baseline: the router's logits of residents are raised by a constant, and the best chosen
    again; the weights are of the logits as they were (cache-conditional routing).

    A router that chooses by more than its logits (a bias, groups) keeps what it chose unless a
    resident's raised logit beats that of an absent choice: without those that is the same.
    """

    def __init__(self, gates: Gates, prior: float, weighing: Weighing) -> None:
        self._gates = gates
        self._prior = prior
        self._weighing = weighing

    def __call__(self, facts: Facts) -> RoutedTokens | None:
        routing = facts.routing
        if routing is None or routing.scores is None or self._prior <= 0:
            return None
        absent = absent_experts(facts)
        is_open = self._gates.open_tokens(facts, routing) & absent[routing.experts].any(axis=1)
        if not is_open.any():
            return None
        logits = routing.scores.astype(np.float64)
        here = who_is_here(facts)
        found, weights = routing.experts.copy(), routing.weights.copy()
        for token in is_open.nonzero()[0].tolist():
            self._choose_anew(found[token], logits[token], absent, here)
        is_changed = (found != routing.experts).any(axis=1)
        changed = is_changed.nonzero()[0]
        weights[changed] = self._weighing.weights(logits[changed], found[changed])
        return _within_mass_by_token(routing, found, weights, is_changed, facts.left)

    def _choose_anew(
        self, chosen: IntArray, logits: FloatArray, absent: BoolArray, here: BoolArray
    ) -> None:
        """The weakest absent choice against the strongest resident that is not chosen, and on."""
        places = absent[chosen].nonzero()[0]
        places = places[np.argsort(logits[chosen[places]], kind="stable")]
        others = here.copy()
        others[chosen] = False
        rivals = others.nonzero()[0]
        rivals = rivals[np.argsort(-logits[rivals], kind="stable")]
        for place, rival in zip(places, rivals, strict=False):
            if logits[rival] + self._prior <= logits[chosen[place]]:
                return
            chosen[place] = rival


def who_is_here(facts: Facts) -> BoolArray:
    """Who can stand in: residents that nothing has to be brought for. [num_experts]"""
    return facts.is_kept if facts.is_here is None else facts.is_here


def _replace_by_rank(
    facts: Facts,
    gates: Gates,
    rho: Rho,
    stand_in: Callable[[IntArray], int],
    keeps_weight: bool = True,
) -> RoutedTokens | None:
    """`stand_in` chooses of the residents outside a token's experts, for each absent one."""
    routing = facts.routing
    if routing is None:
        return None
    may = absent_experts(facts)[routing.experts]
    if may.any():
        may &= gates.open_tokens(facts, routing)[:, None]
    found, weights = routing.experts.copy(), routing.weights.copy()
    here, most = who_is_here(facts), rho.of(may.shape[1])
    for token in np.flatnonzero(may.any(axis=1)).tolist():
        others = here.copy()
        others[routing.experts[token]] = False
        ranks = np.argsort(-routing.weights[token], kind="stable")
        for place in ranks[may[token, ranks]][:most].tolist():
            candidates = others.nonzero()[0]
            if not len(candidates):
                break
            found[token, place] = stand_in(candidates)
            others[found[token, place]] = False
            if not keeps_weight:
                weights[token, place] = 0.0
    return answer_of(routing, found, facts.left, weights)


def _within_mass_by_token(
    routing: RoutedTokens,
    found: IntArray,
    weights: WeightArray,
    is_changed: BoolArray,
    left: Left | None,
) -> RoutedTokens | None:
    """A token's experts all chosen again or none, since its weights hang together."""
    mass_left = None if left is None else left.mass.tolist()
    for token in is_changed.nonzero()[0].tolist():
        moved = found[token] != routing.experts[token]
        mass = float(routing.weights[token][moved].sum(dtype=np.float64))
        if mass_left is not None and left is not None:
            if mass > mass_left[left.owner[token]]:
                found[token], weights[token] = routing.experts[token], routing.weights[token]
                is_changed[token] = False
                continue
            mass_left[left.owner[token]] -= mass
    return in_order(found, weights) if is_changed.any() else None
