"""Ours: experts are given up only where waiting for them would make the layer take longer.

An expert is late when the cost model has it ready after the residents' computation has ended: the
layer's deadline. Of those that wait for one thing (the disk, the link, the host's threads) as many
are given up as are too many for it, those of least router mass first, each for all its tokens in
the pass or for none: one token that needs it has it brought.
"""

from __future__ import annotations

import numpy as np

from lowtide.buddies import BuddyTwins, Waits
from lowtide.core import Facts, RoutedTokens
from lowtide.policies.assignment import Assign
from lowtide.policies.buddy_gates import Gates, Psi
from lowtide.policies.buddy_lists import BuddyLists
from lowtide.policies.buddy_search import UNBOUNDED
from lowtide.policies.miss import LayerTwins, Rho

_SLACK = 1 + 1e-9
"""Of a deadline: sums of the same times in another order differ by less."""

DISK, LINK, THREADS = 1, 2, 3
"""What `Waits.queue_of` has."""


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
        twins: BuddyTwins | None = None,
    ) -> None:
        """assign: who would compute what if nobody were given up, beside a device."""
        self._layers = LayerTwins(lists, gates, psi, rho, search_rank, twins)
        self._assign = assign

    def __call__(self, facts: Facts) -> RoutedTokens | None:
        if facts.routing is None:
            return None
        waits = waits_of(facts, self._assign)
        state = self._layers.state(facts, facts.routing)
        return self._layers.of(facts.layer).give_up_late(state, waits)


def waits_of(facts: Facts, assign: Assign) -> Waits:
    """What absent experts wait for, until the residents' computation has ended.

    The host alone reads what is absent; beside a device an expert that the host holds and computes
    in time is not late.
    """
    costs, demand = facts.costs, facts.demand
    if not facts.has_idle_link:  # no device
        residents_s = costs.device_s(demand.num_tokens[demand.is_resident])
        deadline_s = float(residents_s.sum()) * _SLACK
        return Waits(None, (0.0, 0.0), (costs.fetch_s, 0.0), None, deadline_s)
    assignment = assign(facts)
    tokens_of = np.zeros(len(facts.is_kept), np.int64)
    tokens_of[demand.experts] = demand.num_tokens
    deadline_s = float(costs.device_s(tokens_of[assignment.resident]).sum()) * _SLACK
    queue_of = np.zeros(len(tokens_of), np.uint8)
    queue_of[assignment.fetch] = LINK
    queue_of[assignment.host] = THREADS
    if facts.is_at_host is not None:
        queue_of[~facts.is_at_host] = DISK
    each_s = costs.disk_read_s, costs.link_s
    return Waits(queue_of, (0.0, facts.link_s), each_s, costs.host_s(tokens_of), deadline_s)
