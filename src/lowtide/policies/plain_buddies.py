"""BuddyMoE's substitution in plain Python: gates, Algorithm 1, late experts, bound on mass.

The reference of `kernels/cpu/decisions/buddies.cpp`. Sums used in comparisons are added in the
order of tokens and places, as in the compiled twin, so that both decide identically to the last
bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.buddies import (
    NOT_FINITE,
    LayerRules,
    LayerTwin,
    Masses,
    Moved,
    PassAccount,
    Waits,
    compatibility,
)
from lowtide.core import BoolArray, Facts, FloatArray, IntArray, Left, RoutedTokens, WeightArray
from lowtide.errors import InternalError
from lowtide.policies.assignment import Assign, Balance
from lowtide.policies.buddy_profile import token_entropy
from lowtide.policies.substitution import (
    absent_experts,
    in_order,
    is_runnable,
    keep_within,
    replaced,
    router_mass,
    stand_ins,
)

_SLACK = 1e-12
"""Slack of entropies and margins for rounding: the same weights are added in another order."""


class PlainBuddies:
    """Plain implementations of BuddyMoE's steps."""

    def balance(self) -> Assign:
        return Balance()

    def of_layer(self, rules: LayerRules) -> LayerTwin:
        return PlainLayer(rules)

    def of_pass(
        self, owner: IntArray, before: Masses, num_layers: int, share: float | None
    ) -> PassAccount:
        return PlainAccount(owner, before, num_layers, share)


class PlainLayer:
    def __init__(self, rules: LayerRules) -> None:
        self._rules = rules

    def __call__(
        self, facts: Facts, account: PassAccount, waits: Waits | None = None
    ) -> RoutedTokens | None:
        asked = facts.routing
        if asked is None or not asked.experts.size:
            return None
        left = account.route(asked.weights)
        layer = _LayerTokens(self._rules, facts, asked, left)
        run = layer.without_absent() if waits is None else layer.without_late(waits)
        if run and not account.move(facts.layer, asked, run, len(facts.is_kept)):
            raise InternalError(NOT_FINITE)
        if run and isinstance(account, PlainAccount):
            account.cross(layer.num_hops())
        return run


class _LayerTokens:
    """One layer's tokens, and the expert that runs for each of their places so far."""

    def __init__(
        self, rules: LayerRules, facts: Facts, asked: RoutedTokens, left: Left | None
    ) -> None:
        self._rules, self._asked, self._left = rules, asked, left
        self._is_here = stand_ins(facts)
        self._absent = absent_experts(facts)
        share = np.count_nonzero(self._absent) / max(1, len(facts.demand.experts))
        kinds = facts.step.rows_of(len(asked.weights)).kind
        self._is_open = open_tokens(rules, kinds, asked.weights, share)  # [tokens]
        self._found = asked.experts.copy()
        self._compatible = compatibility(asked, rules.eta) if rules.eta else None

    def num_hops(self) -> IntArray:
        """Return the partitions that each token's replacements crossed, [tokens]."""
        if self._rules.partition is None:
            return np.zeros(len(self._found), np.int64)
        hops = hops_of(self._rules.partition)[self._asked.experts, self._found]
        total: IntArray = hops.sum(axis=1)
        return total

    def without_absent(self) -> RoutedTokens | None:
        """Replace absent experts by Algorithm 1."""
        may: BoolArray = self._is_open[:, None] & self._absent[self._asked.experts]
        ranks = np.argsort(-self._asked.weights, axis=1, kind="stable")
        for token in np.flatnonzero(may.any(axis=1)).tolist():
            places = ranks[token, may[token, ranks[token]]]
            self._substitute_token(token, places.tolist())
        is_moved = self._found != self._asked.experts
        if self._left is not None and not keep_within(is_moved, self._asked.weights, self._left):
            self._found = np.where(is_moved, self._found, self._asked.experts)
        return in_order(self._found, self._asked.weights) if is_moved.any() else None

    def _substitute_token(self, token: int, places: list[int]) -> None:
        """Replace a token's absent experts: the paper's lines 11 to 20, with a budget of `rho`.

        No expert appears twice for a token, not even a replaced one. places: of absent experts, the
        largest weight first.
        """
        in_use = set(self._asked.experts[token].tolist())
        num_left = self._rules.rho
        for place in places:
            if num_left < 1:
                return
            for buddy in self._ranked(token, self._asked.experts[token, place]):
                if self._is_here[buddy] and buddy not in in_use:
                    self._found[token, place] = buddy
                    in_use.add(buddy)
                    num_left -= 1
                    break

    def _ranked(self, token: int, expert: int) -> list[int]:
        """Return an expert's buddies for a token, the highest Psi first, ties as listed."""
        buddies = self._rules.lists[expert]
        buddies = buddies[buddies >= 0]
        if self._compatible is not None and self._rules.psi is not None:
            psi = self._rules.psi[expert, : len(buddies)] * self._compatible[token, buddies]
            buddies = buddies[np.argsort(-psi, kind="stable")]
        ranked: list[int] = buddies.tolist()
        return ranked

    def without_late(self, waits: Waits) -> RoutedTokens | None:
        """Replace late experts, each for all of its tokens or none.

        A single remaining token would still need the expert's bytes.
        """
        queues = [queue for queue in self._queues(waits) if queue.num_late]
        if not queues:
            return None
        self._num_left = np.where(self._is_open, self._rules.rho, 0)  # [tokens]
        self._in_use = np.zeros((len(self._is_open), len(self._is_here)), np.bool_)
        np.put_along_axis(self._in_use, self._asked.experts, True, axis=1)
        for experts, num_late in queues:
            for expert in experts.tolist():
                num_late -= num_late > 0 and self._give_up(expert)
        if (self._found == self._asked.experts).all():
            return None
        return in_order(self._found, self._asked.weights)

    def _queues(self, waits: Waits) -> Iterator[_Queue]:
        """Yield the queues for the disk, then the link, then the host's threads."""
        queue_of = waits.queue_of
        number_of = np.ones(len(self._absent), np.uint8) if queue_of is None else queue_of
        mass = router_mass(self._asked, len(self._absent))
        for number in (1, 2):
            experts = by_mass(self._absent & (number_of == number), mass)
            place = np.arange(1, len(experts) + 1)
            ends_s = waits.starts_s[number - 1] + place * waits.each_s[number - 1]
            yield _Queue(experts, int(np.count_nonzero(ends_s > waits.deadline_s)))
        experts = by_mass(self._absent & (number_of == 3), mass)
        host_s = np.zeros(len(self._absent)) if waits.host_s is None else waits.host_s
        # The expert with most mass is computed first, as far as there is time.
        ends_s = host_s[experts[::-1]].cumsum()
        yield _Queue(experts, int(np.count_nonzero(ends_s > waits.deadline_s)))

    def _give_up(self, expert: int) -> bool:
        """Replace an expert for all of its tokens; return False, changing nothing, if it fails."""
        tokens, places = (self._asked.experts == expert).nonzero()
        if (self._num_left[tokens] < 1).any():
            return False
        left = self._left
        if left is not None:
            masses = self._asked.weights[tokens, places].astype(np.float64)
            mass = left.mass - np.bincount(left.owner[tokens], masses, len(left.mass))
            if (mass < 0).any():
                return False
            left = left._replace(mass=mass)
        buddies = self._rules.lists[expert]
        is_free = (buddies >= 0) & self._is_here[buddies] & ~self._in_use[tokens[:, None], buddies]
        if not is_free.any(axis=1).all():
            return False
        rank = is_free.astype(np.float64)
        if self._compatible is not None and self._rules.psi is not None:
            psi = self._rules.psi[expert] * self._compatible[tokens[:, None], buddies]
            rank = np.where(is_free, psi, -np.inf)
        chosen = buddies[rank.argmax(axis=1)]
        self._found[tokens, places] = chosen
        self._in_use[tokens, chosen] = True
        self._num_left[tokens] -= 1
        self._left = left
        return True


class _Queue(NamedTuple):
    """Absent experts in one queue, and the number of them for which it is too slow."""

    experts: IntArray  # by router mass, least first
    num_late: int


class PlainAccount:
    def __init__(
        self, owner: IntArray, before: Masses, num_layers: int, share: float | None
    ) -> None:
        self._owner = owner
        self._num_owners = len(before.routed)
        self._share = share
        self._routed, self._moved = (np.array(masses, np.float64) for masses in before)
        self._is_affected = np.zeros(len(owner), np.bool_)
        self._pairs = np.zeros((num_layers, self._num_owners), np.int64)
        self._tokens = np.zeros(self._num_owners, np.int64)
        self._hops = np.zeros(self._num_owners, np.int64)

    @property
    def masses(self) -> Masses:
        return Masses(self._routed.tolist(), self._moved.tolist())

    @property
    def moved(self) -> Moved:
        return Moved(self._pairs.tolist(), self._tokens.tolist(), self._hops.tolist())

    def route(self, weights: WeightArray) -> Left | None:
        owners = np.repeat(self._owner, weights.shape[1])
        self._routed += np.bincount(owners, weights.ravel(), minlength=self._num_owners)
        if self._share is None:
            return None
        return Left(self._owner, np.fmax(self._share * self._routed - self._moved, 0.0))

    def move(self, layer: int, asked: RoutedTokens, run: RoutedTokens, num_experts: int) -> bool:
        if not is_runnable(run, num_experts):
            return False
        is_moved = replaced(asked, run)
        owners = np.repeat(self._owner, is_moved.sum(axis=1))
        self._moved += np.bincount(owners, asked.weights[is_moved], minlength=self._num_owners)
        newly = is_moved.any(axis=1) & ~self._is_affected
        self._is_affected |= newly
        self._tokens += np.bincount(self._owner[newly], minlength=self._num_owners)
        self._pairs[layer] += np.bincount(owners, minlength=self._num_owners)
        return True

    def cross(self, hops: IntArray) -> None:
        """Count partitions that the tokens' replacements crossed, [tokens]."""
        np.add.at(self._hops, self._owner, hops)


def open_tokens(
    rules: LayerRules, kinds: NDArray[np.uint8], weights: WeightArray, absent_share: float
) -> BoolArray:
    """Mark the tokens whose experts the paper's gates (3.1) allow to be replaced: [tokens].

    The gates are a token's activating entropy and margin, and the layer's share of absent experts.
    One more gate is not the paper's: rows with lasting results stay exact unless an option says
    otherwise.
    """
    is_open: BoolArray = (rules.exact_kinds >> kinds.astype(np.int64)) & 1 == 0
    if rules.entropy >= 0:
        is_open &= token_entropy(weights, rules.temperature) > rules.entropy + _SLACK
    if np.isfinite(rules.margin):
        is_open &= token_margins(weights) < rules.margin - _SLACK
    return is_open & (absent_share < rules.beta)


def token_margins(weights: WeightArray) -> FloatArray:
    """Return a token's best p less its second best, with weights normalised to 1: [tokens]."""
    if weights.shape[1] < 2:
        return np.ones(len(weights))
    best = -np.partition(-weights.astype(np.float64), 1, axis=1)
    margins: FloatArray = (best[:, 0] - best[:, 1]) / weights.sum(axis=1, dtype=np.float64)
    return margins


def hops_of(partition: IntArray) -> IntArray:
    """Return the partitions between every two experts' devices, which lie in a line: [e, e]."""
    hops: IntArray = np.abs(partition[:, None] - partition)
    return hops


def by_mass(which: BoolArray, mass: FloatArray) -> IntArray:
    """Return the experts of `which` [num_experts], by rising router mass, ties by id."""
    experts = which.nonzero()[0]
    ordered: IntArray = experts[np.argsort(mass[experts], kind="stable")]
    return ordered
