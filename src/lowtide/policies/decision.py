"""What the policies of one preset decide together, for one layer of one step.

The same object is driven by the runtime and by the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lowtide.core import Assignment, Costs, Facts, IntArray, Moves, RoutedTokens
from lowtide.policies.assignment import Assign
from lowtide.policies.placement import Placement
from lowtide.policies.prefetch import Prefetch
from lowtide.policies.substitution import Substitution, check_substituted


class Decision(NamedTuple):
    """What has to be known before a layer's work starts."""

    assignment: Assignment
    moves: Moves | None  # None: nothing waits for them, `Policies.moves` will tell


@dataclass(frozen=True, slots=True)
class Policies:
    """A preset at work: its policies, made for one model and one budget.

    capacity: [num_layers], residents of each layer at the start, as the preset divides them; what
    `Facts.capacity` is until there is more room or less. costs: what the policies were made for,
    and are told of in every step.
    waits: whether a step waits for the experts its placement admits (TIDE's Eq. 3) and runs them
    on the device, or computes them where they are and lets the moves follow (TIDE's Algorithm 1).
    substitution: what may have other experts run than the router chose, if anything.
    asks_routing: whether the facts are to have each token's experts and weights; asks_scores: and
    its router's scores.
    """

    placement: Placement
    assign: Assign
    prefetch: Prefetch
    capacity: IntArray
    costs: Costs
    waits: bool = False
    substitution: Substitution | None = None
    asks_routing: bool = False
    asks_scores: bool = False

    def substitute(self, facts: Facts) -> RoutedTokens | None:
        """What is to run instead of what the router chose, if anything else is.

        Raises InternalError for a substitution's answer that cannot be run.
        """
        asked = facts.routing
        if self.substitution is None or asked is None or facts.demand.is_resident.all():
            return None
        answer = self.substitution(facts)
        if answer is not None:
            check_substituted(answer, asked, len(facts.is_kept))
        return answer

    def decide(self, facts: Facts, run: Facts | None = None) -> Decision:
        """Who computes what, after a layer's router.

        run: the facts of what is run, where that is not what the router demanded; they matter for
        the assignment alone.
        """
        run = facts if run is None else run
        if self.waits:
            moves = self.placement.update(facts)
            assignment = self.assign(run)
            is_awaited = facts.can_fetch and len(moves.admit)
            return Decision(_promoted(assignment, moves.admit) if is_awaited else assignment, moves)
        return Decision(self.assign(run), None)

    def moves(self, facts: Facts, decision: Decision) -> Moves:
        """What is resident from now on; asked once, when the work of `decision` is under way.

        `facts` are those that `decide` was told of the router's demand.
        """
        if decision.moves is not None:
            return decision.moves
        fetched = decision.assignment.fetch
        if not facts.has_idle_link:
            is_run = decision.assignment.host
            fetched = is_run[~facts.is_kept[is_run]]
        if len(fetched):
            facts = facts._replace(fetched=fetched)
        moves = self.placement.update(facts)
        return moves if facts.has_idle_link else of_those(moves, fetched)


def of_those(moves: Moves, fetched: IntArray) -> Moves:
    """Those of `moves` that admit experts fetched anyway, and none in place of the others.

    Without an idle link nobody else can come; the placement will ask again.
    """
    if not len(moves.admit):
        return moves
    admit = moves.admit[np.isin(moves.admit, fetched)]
    num_left_out = len(moves.admit) - len(admit)
    return Moves(admit, moves.evict[num_left_out:])


def _promoted(assignment: Assignment, admit: IntArray) -> Assignment:
    """The host's experts that become resident now are waited for instead."""
    is_promoted = np.isin(assignment.host, admit)
    fetch = np.sort(np.concatenate([assignment.fetch, assignment.host[is_promoted]]))
    return Assignment(assignment.resident, fetch, assignment.host[~is_promoted])
