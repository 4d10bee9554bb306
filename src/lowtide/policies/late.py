"""Ours: experts are given up only where waiting for them would make the layer take longer.

An expert is late when the cost model has it ready after the residents' computation has ended: the
layer's deadline. Experts queue for the disk, the link or the host's threads. From each queue as
many are given up as cannot be ready in time, those of least router mass first, each for all its
tokens in the pass or for none: one token that needs it has it brought.
"""

from __future__ import annotations

from lowtide.buddies import BuddyTwins, PassAccount
from lowtide.core import Facts, RoutedTokens
from lowtide.policies.assignment import Assign
from lowtide.policies.buddy_gates import Gates, Psi
from lowtide.policies.buddy_lists import BuddyLists
from lowtide.policies.buddy_search import UNBOUNDED
from lowtide.policies.miss import LayerTwins, Rho
from lowtide.policies.plain_buddies import PlainBuddies
from lowtide.policies.substitution import CountedSubstitution
from lowtide.policies.waits import waits_of


class Late(CountedSubstitution):
    """Gives up the late experts whose every token may have a buddy in their place."""

    def __init__(
        self,
        lists: BuddyLists,
        gates: Gates,
        psi: Psi,
        rho: Rho,
        assign: Assign,
        search_rank: int = UNBOUNDED,
        twins: BuddyTwins | None = None,
    ) -> None:
        """assign: who would compute what if none were given up, beside a device."""
        self._layers = LayerTwins(lists, gates, psi, rho, search_rank, twins)
        self._assign = assign
        balance = (PlainBuddies() if twins is None else twins).balance()
        self._is_balanced = isinstance(assign, type(balance))

    def counted(self, facts: Facts, account: PassAccount | None) -> RoutedTokens | None:
        if facts.routing is None:
            return None
        layer = self._layers.of(facts.layer)
        state = self._layers.state(facts, facts.routing, account)
        if not facts.has_idle_link:
            return layer.give_up_late_alone(state, facts)
        if self._is_balanced:
            return layer.give_up_late_beside(state, facts)
        return layer.give_up_late(state, waits_of(facts, self._assign))
