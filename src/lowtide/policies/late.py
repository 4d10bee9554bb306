"""Ours: experts are given up only where waiting for them would make the layer take longer.

An expert is late when the cost model has it ready after the residents' computation has ended: the
layer's deadline. Of those that wait for one thing (the disk, the link, the host's threads) as many
are given up as are too many for it, those of least router mass first, each for all its tokens in
the pass or for none: one token that needs it has it brought.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.core import BoolArray, Facts, FloatArray, IntArray, RoutedTokens
from lowtide.policies.assignment import Assign
from lowtide.policies.buddy_gates import Gates, Psi, absent_experts
from lowtide.policies.buddy_lists import BuddyLists
from lowtide.policies.buddy_search import UNBOUNDED
from lowtide.policies.miss import Rho, lists_for, router_mass, who_is_here
from lowtide.policies.substitution import in_order

Ends = Callable[[int], float]
"""When the n-th of a queue has come, in seconds from the layer's beginning; n from 1."""

_SLACK = 1 + 1e-9
"""Of a deadline: sums of the same times in another order differ by less."""


class Queue(NamedTuple):
    """Absent experts that wait for the same thing, and how many of them it is too slow for."""

    experts: IntArray  # by router mass, least first
    num_late: int


class Late:
    """Gives up the late experts whose every token may have a buddy in their place."""

    def __init__(
        self,
        lists: BuddyLists,
        gates: Gates,
        psi: Psi,
        rho: Rho,
        assign: Assign,
        search_rank: int = UNBOUNDED,
    ) -> None:
        """assign: who would compute what if nobody were given up, beside a device."""
        self._lists = lists
        self._gates = gates
        self._psi = psi
        self._rho = rho
        self._assign = assign
        self._search_rank = search_rank

    def __call__(self, facts: Facts) -> RoutedTokens | None:
        routing = facts.routing
        if routing is None:
            return None
        queues = [queue for queue in late_queues(facts, routing, self._assign) if queue.num_late]
        if not queues:
            return None
        is_open = self._gates.open_tokens(facts, routing)
        if not is_open.any():
            return None
        rho = self._rho.of(routing.experts.shape[1])
        lists, list_of = lists_for(self._lists, self._psi, facts, routing)
        spending = _Spending(facts, routing, lists[:, : self._search_rank], list_of, is_open, rho)
        for experts, num_late in queues:
            for expert in experts.tolist():
                num_late -= num_late > 0 and spending.give_up(expert)
        return spending.answer()


class _Spending:
    """What may still be spent on a layer's tokens, and who stands in where so far."""

    def __init__(
        self,
        facts: Facts,
        routing: RoutedTokens,
        lists: NDArray[np.int32],
        list_of: IntArray | None,
        is_open: BoolArray,
        rho: int,
    ) -> None:
        self._routing = routing
        self._lists = lists
        self._list_of = routing.experts if list_of is None else list_of
        self._num_left = np.where(is_open, rho, 0)  # [tokens]
        self._is_here = who_is_here(facts)
        self._in_use = np.zeros((len(is_open), len(self._is_here)), np.bool_)
        np.put_along_axis(self._in_use, routing.experts, True, axis=1)
        self._found = routing.experts.copy()
        self._left = facts.left
        self._mass_left = None if facts.left is None else facts.left.mass.copy()

    def give_up(self, expert: int) -> bool:
        """All tokens of an expert get a buddy, or none does; which of the two."""
        tokens, places = (self._routing.experts == expert).nonzero()
        if (self._num_left[tokens] < 1).any():
            return False
        mass_left = self._after(tokens, self._routing.weights[tokens, places].astype(np.float64))
        if mass_left is not None and (mass_left < 0).any():
            return False
        buddies = self._lists[self._list_of[tokens, places]]  # [rows of the expert, length]
        is_free = (buddies >= 0) & self._is_here[buddies]
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
        if (self._found == self._routing.experts).all():
            return None
        return in_order(self._found, self._routing.weights)

    def _after(self, tokens: IntArray, masses: FloatArray) -> FloatArray | None:
        if self._left is None or self._mass_left is None:
            return None
        owners = self._left.owner[tokens]
        left: FloatArray = self._mass_left - np.bincount(owners, masses, len(self._mass_left))
        return left


def late_queues(facts: Facts, routing: RoutedTokens, assign: Assign) -> Iterator[Queue]:
    """Who waits for the disk, then for the link, then for the host's threads.

    The host alone reads what is absent; beside a device an expert that the host holds and computes
    in time is not late.
    """
    absent = absent_experts(facts)
    if not absent.any():
        return
    mass, costs = router_mass(routing, len(absent)), facts.costs
    tokens_of = np.zeros(len(absent), np.int64)
    tokens_of[facts.demand.experts] = facts.demand.num_tokens
    if not facts.has_idle_link:  # no device
        residents = facts.demand.experts[facts.demand.is_resident]
        deadline_s = float(costs.device_s(tokens_of[residents]).sum()) * _SLACK
        yield _queue(absent, mass, lambda n: n * costs.fetch_s, deadline_s)
        return
    assignment = assign(facts)
    deadline_s = float(costs.device_s(tokens_of[assignment.resident]).sum()) * _SLACK
    is_at_host = np.ones_like(absent) if facts.is_at_host is None else facts.is_at_host
    yield _queue(absent & ~is_at_host, mass, lambda n: n * costs.disk_read_s, deadline_s)
    fetched = np.zeros_like(absent)
    fetched[assignment.fetch] = True
    fetched &= absent & is_at_host
    yield _queue(fetched, mass, lambda n: facts.link_s + n * costs.link_s, deadline_s)
    by_host = np.zeros_like(absent)
    by_host[assignment.host] = True
    by_host &= absent & is_at_host
    experts = by_mass(by_host, mass)
    # Whoever has most mass is computed first, as far as there is time.
    ends_s = costs.host_s(tokens_of[experts[::-1]]).cumsum()
    yield Queue(experts, int(np.count_nonzero(ends_s > deadline_s)))


def by_mass(which: BoolArray, mass: FloatArray) -> IntArray:
    """Experts of `which` [num_experts], those of least router mass first, ties by id."""
    experts = which.nonzero()[0]
    ordered: IntArray = experts[np.argsort(mass[experts], kind="stable")]
    return ordered


def _queue(which: BoolArray, mass: FloatArray, end_s: Ends, deadline_s: float) -> Queue:
    """Of experts that come one after the other: those are late that end behind the deadline."""
    experts = by_mass(which, mass)
    num_late = sum(end_s(n) > deadline_s for n in range(1, len(experts) + 1))
    return Queue(experts, num_late)
