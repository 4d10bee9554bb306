"""The plain twin of substitution in one layer: gates, Algorithm 1, bounds and order in numpy.

Sums that something is compared with are taken in the order of tokens and places, as the compiled
twin takes them, so that both decide the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.buddies import (
    NOT_FINITE,
    LayerRules,
    LayerState,
    LayerTwin,
    Masses,
    Moved,
    PassAccount,
    Saved,
    Waits,
)
from lowtide.core import BoolArray, Facts, FloatArray, IntArray, Left, RoutedTokens, WeightArray
from lowtide.errors import InternalError
from lowtide.policies.assignment import Assign, Balance, HostAlone
from lowtide.policies.buddy_gates import open_tokens
from lowtide.policies.buddy_search import BuddySearch, search_buddies
from lowtide.policies.substitution import (
    answer_of,
    in_order,
    is_runnable,
    replaced,
    router_mass,
)
from lowtide.policies.waits import waits_of


class Queue(NamedTuple):
    """Absent experts that wait for the same thing, and how many of them it is too slow for."""

    experts: IntArray  # by router mass, least first
    num_late: int


class PlainBuddies:
    """The plain twins."""

    def balance(self) -> Assign:
        return Balance()

    def of_layer(self, rules: LayerRules) -> LayerTwin:
        return PlainLayer(rules)

    def of_pass(
        self, owner: IntArray, before: Masses, num_layers: int, share: float | None
    ) -> PassAccount:
        return PlainAccount(owner, before, num_layers, share)


class PlainLayer:
    """See `LayerTwin`."""

    def __init__(self, rules: LayerRules) -> None:
        self._rules = rules

    def replace_absent(self, state: LayerState, num_fit: int = 0) -> RoutedTokens | None:
        if state.account is not None:
            return self._counted(state, lambda bounded: self.replace_absent(bounded, num_fit))
        absent = absent_of(state)
        may = self._open_tokens(state, absent)[:, None] & absent[state.experts]
        if num_fit:
            kept = by_mass(absent, router_mass(state.experts, state.weights, len(absent)))
            may &= ~np.isin(state.experts, kept[-num_fit:])
        lists, list_of = self._lists(state)
        rank = self._rules.search_rank
        routing = RoutedTokens(state.experts, state.weights)
        search = BuddySearch(*routing[:2], may, lists, list_of, state.is_here, rank, state.rho)
        return answer_of(routing, search_buddies(search), _left(state))

    def give_up_late(self, state: LayerState, waits: Waits) -> RoutedTokens | None:
        if state.account is not None:
            return self._counted(state, lambda bounded: self.give_up_late(bounded, waits))
        absent = absent_of(state)
        queues = [queue for queue in late_queues(state, absent, waits) if queue.num_late]
        if not queues:
            return None
        is_open = self._open_tokens(state, absent)
        lists, list_of = self._lists(state)
        spending = _Spending(state, is_open, lists[:, : self._rules.search_rank], list_of)
        for experts, num_late in queues:
            for expert in experts.tolist():
                num_late -= num_late > 0 and spending.give_up(expert)
        return spending.answer()

    def give_up_late_alone(self, state: LayerState, facts: Facts) -> RoutedTokens | None:
        return self.give_up_late(state, waits_of(facts, HostAlone()))

    def give_up_late_beside(self, state: LayerState, facts: Facts) -> RoutedTokens | None:
        return self.give_up_late(state, waits_of(facts, Balance()))

    def _counted(
        self, state: LayerState, decide: Callable[[LayerState], RoutedTokens | None]
    ) -> RoutedTokens | None:
        """What is decided by what the account leaves; the account has it then."""
        account, asked = state.account, RoutedTokens(state.experts, state.weights)
        if account is None or not asked.experts.size:
            return None
        owner, left = account.route(state.weights) or (None, None)
        answer = decide(state._replace(owner=owner, left=left, account=None))
        num_experts = len(state.is_here)
        if answer and not account.move(self._rules.layer, asked, answer, num_experts):
            raise InternalError(NOT_FINITE)
        return answer

    def _lists(self, state: LayerState) -> tuple[NDArray[np.int32], IntArray | None]:
        if state.lists is None:
            return self._rules.lists, None
        return state.lists, np.arange(state.experts.size).reshape(state.experts.shape)

    def _open_tokens(self, state: LayerState, absent: BoolArray) -> BoolArray:
        share = np.count_nonzero(absent) / max(1, len(np.unique(state.experts)))
        return open_tokens(self._rules.gates, state.kinds, state.weights, share)


class PlainAccount:
    """See `PassAccount`."""

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

    @property
    def masses(self) -> Masses:
        return Masses(self._routed.tolist(), self._moved.tolist())

    @property
    def moved(self) -> Moved:
        return Moved(self._pairs.tolist(), self._tokens.tolist())

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

    def saved(self, asked: RoutedTokens, run: RoutedTokens, expert_bytes: FloatArray) -> Saved:
        is_moved = replaced(asked, run)
        owners = np.repeat(self._owner, is_moved.sum(axis=1))
        experts = asked.experts[is_moved]
        num_bytes = expert_bytes[experts]
        of_pair = num_bytes / np.bincount(experts, minlength=len(expert_bytes))[experts]
        shares = np.bincount(owners, of_pair, minlength=self._num_owners)
        in_vain = np.bincount(owners[~(num_bytes > 0)], minlength=self._num_owners)
        return Saved(shares.tolist(), in_vain.tolist())


def absent_of(state: LayerState) -> BoolArray:
    """Who is asked for and neither here nor on the way. [num_experts]"""
    absent = np.zeros_like(state.is_here)
    absent[state.experts] = True
    if state.arriving_s is not None:
        absent[absent.nonzero()[0][np.isfinite(state.arriving_s)]] = False
    return absent & ~state.is_here


def late_queues(state: LayerState, absent: BoolArray, waits: Waits) -> Iterator[Queue]:
    """Who waits for the disk, then for the link, then for the host's threads."""
    queue_of = waits.queue_of
    number_of = np.ones(len(absent), np.uint8) if queue_of is None else queue_of
    mass = router_mass(state.experts, state.weights, len(absent))
    for number in (1, 2):
        experts = by_mass(absent & (number_of == number), mass)
        place = np.arange(1, len(experts) + 1)
        ends_s = waits.starts_s[number - 1] + place * waits.each_s[number - 1]
        yield Queue(experts, int(np.count_nonzero(ends_s > waits.deadline_s)))
    experts = by_mass(absent & (number_of == 3), mass)
    host_s = np.zeros(len(absent)) if waits.host_s is None else waits.host_s
    # The expert with most mass is computed first, as far as there is time.
    ends_s = host_s[experts[::-1]].cumsum()
    yield Queue(experts, int(np.count_nonzero(ends_s > waits.deadline_s)))


def by_mass(which: BoolArray, mass: FloatArray) -> IntArray:
    """Experts of `which` [num_experts], those of least router mass first, ties by id."""
    experts = which.nonzero()[0]
    ordered: IntArray = experts[np.argsort(mass[experts], kind="stable")]
    return ordered


def _left(state: LayerState) -> Left | None:
    if state.owner is None or state.left is None:
        return None
    return Left(state.owner, state.left)


class _Spending:
    """What may still be spent on a layer's tokens, and who stands in where so far."""

    def __init__(
        self,
        state: LayerState,
        is_open: BoolArray,
        lists: NDArray[np.int32],
        list_of: IntArray | None,
    ) -> None:
        self._state = state
        self._lists = lists
        self._list_of = state.experts if list_of is None else list_of
        self._num_left = np.where(is_open, state.rho, 0)  # [tokens]
        self._in_use = np.zeros((len(is_open), len(state.is_here)), np.bool_)
        np.put_along_axis(self._in_use, state.experts, True, axis=1)
        self._found = state.experts.copy()
        self._mass_left = None if state.left is None else state.left.copy()

    def give_up(self, expert: int) -> bool:
        """All tokens of an expert get a buddy, or none does; which of the two."""
        tokens, places = (self._state.experts == expert).nonzero()
        if (self._num_left[tokens] < 1).any():
            return False
        mass_left = self._after(tokens, self._state.weights[tokens, places].astype(np.float64))
        if mass_left is not None and (mass_left < 0).any():
            return False
        buddies = self._lists[self._list_of[tokens, places]]  # [rows of the expert, length]
        is_free = (buddies >= 0) & self._state.is_here[buddies]
        is_free &= ~self._in_use[tokens[:, None], buddies]
        if not is_free.any(axis=1).all():
            return False
        chosen = buddies[np.arange(len(tokens)), is_free.argmax(axis=1)]
        self._found[tokens, places] = chosen
        self._in_use[tokens, chosen] = True
        self._num_left[tokens] -= 1
        self._mass_left = mass_left
        return True

    def answer(self) -> RoutedTokens | None:
        if (self._found == self._state.experts).all():
            return None
        return in_order(self._found, self._state.weights)

    def _after(self, tokens: IntArray, masses: FloatArray) -> FloatArray | None:
        if self._state.owner is None or self._mass_left is None:
            return None
        owners = self._state.owner[tokens]
        left: FloatArray = self._mass_left - np.bincount(owners, masses, len(self._mass_left))
        return left
