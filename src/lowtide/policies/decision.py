"""Decisions that a preset's policies make together for one layer of one step.

The runtime and the simulator use the same object.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lowtide.core import Assignment, Costs, Facts, FloatArray, IntArray, Moves, RoutedTokens, Step
from lowtide.errors import InternalError
from lowtide.policies.answers import check_assignment, is_own
from lowtide.policies.assignment import Assign
from lowtide.policies.placement import Placement
from lowtide.policies.prefetch import Prefetch
from lowtide.policies.ranks import Ranks, admit, of_those
from lowtide.policies.readmission import Readmission
from lowtide.policies.receipt import Receipts
from lowtide.policies.substitution import CountedSubstitution, Substitution


class Decision(NamedTuple):
    """The part of a decision that must be known before a layer's work starts."""

    assignment: Assignment
    moves: Moves | None  # None: nothing waits for them, `Policies.moves` will tell
    run: Facts | None = None  # of what is run, where that is not what the router demanded


@dataclass(slots=True)
class Policies:
    """A preset's policies, made for one model and one budget.

    Without a device the runtime announces the beginning and end of passes; within a pass the
    placement's `Ranks` determine the moves, in compiled code or by `moves`.

    capacity: [num_layers], residents of each layer at the start, as the preset divides them.
    costs: used to make the policies, and reported to them in every step.
    waits: True if a step waits for admitted experts and runs them on the device (TIDE's Eq. 3);
        False if it computes them where they are, and the moves follow (TIDE's Algorithm 1).
    substitution: may run other experts than the router chose.
    receipts: records its effect on each request, and limits it.
    readmission: of replaced experts, without a device.
    asks_routing: facts include each token's experts and weights.
    asks_scores: facts also include the router's scores.
    solved: options that were computed for this model and machine, for the plan's line.
    """

    placement: Placement
    assign: Assign
    prefetch: Prefetch
    capacity: IntArray
    costs: Costs
    waits: bool = False
    substitution: Substitution | CountedSubstitution | None = None
    receipts: Receipts | None = None
    readmission: Readmission | None = None
    asks_routing: bool = False
    asks_scores: bool = False
    solved: str = ""
    is_checked: bool = field(init=False)  # answers are checked, unless all code is lowtide's own
    _ranks: Ranks | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.is_checked = not is_own(self.placement, self.assign, self.prefetch)

    def begin_pass(self, step: Step, num_residents: IntArray, capacity: IntArray) -> Ranks:
        """Return the ranks of the pass that begins, without a device.

        num_residents, capacity: [num_layers], each layer's residents and its present room.
        """
        self._ranks = self.placement.begin_pass(step, num_residents, capacity)
        return self._ranks

    def end_pass(self, step: Step, hits: IntArray) -> None:
        """Learn a pass' demand, without a device: tokens of each expert [layers, experts]."""
        self.placement.end_pass(step, hits)

    def substitute(self, facts: Facts) -> RoutedTokens | None:
        """Return the routing to run instead of the router's choice; None to keep it.

        Raises InternalError for a routing that cannot be run.
        """
        asked = facts.routing
        if self.substitution is None or self.receipts is None or asked is None:
            return None
        if isinstance(self.substitution, CountedSubstitution):
            return self.substitution.counted(facts, self.receipts.account(facts, asked))
        left = self.receipts.route(facts, asked)
        if facts.demand.is_resident.all():
            return None
        answer = self.substitution(facts._replace(left=left))
        if answer is not None:
            self.receipts.substitute(facts, asked, answer)
        return answer

    def decide(self, facts: Facts, run: Facts | None = None) -> Decision:
        """Decide where each expert is computed, after a layer's router.

        run: facts of the routing after a substitution; used by the assignment only. Raises
        InternalError for an assignment that does not run each expert once.
        """
        known = facts if run is None else run
        moves = self.placement.update(facts) if self.waits else None
        assignment = self.assign(known)
        if self.is_checked:
            check_assignment(assignment, known.demand)
        if moves is not None and facts.can_fetch and len(moves.admit):
            assignment = _promoted(assignment, moves.admit)
        return Decision(assignment, moves, run)

    def moves(self, facts: Facts, decision: Decision) -> Moves:
        """Return the moves of residents; called once, after the work of `decision` has started.

        facts: those of the router's demand, as given to `decide`.
        """
        moves = decision.moves
        if moves is None and facts.has_idle_link:
            if len(decision.assignment.fetch):
                facts = facts._replace(fetched=decision.assignment.fetch)
            moves = self.placement.update(facts)
        elif moves is None:
            moves = self._admitted(facts, decision)
        if self.receipts is not None:
            self.settle(self.receipts, facts, decision, moves)
        return moves

    def _admitted(self, facts: Facts, decision: Decision) -> Moves:
        """Return the moves by the ranks of the pass, without a device."""
        demand, ranks = facts.demand, self._ranks
        if ranks is None:
            raise InternalError("Moves are asked for without a device before a pass has begun.")
        moves = admit(ranks, facts.layer, demand.experts, demand.num_tokens, facts.is_kept)
        if self.readmission is None:
            return moves
        later = self.readmission.choose(facts, decision.run, moves)
        chosen = of_those(moves, np.append(decision.assignment.host, later))
        return chosen._replace(admit=chosen.admit[~np.isin(chosen.admit, later)], later=later)

    def settle(self, receipts: Receipts, facts: Facts, decision: Decision, moves: Moves) -> None:
        """Record a substitution's savings against the assignment of the router's choice."""
        run = decision.run
        if run is None or facts.routing is None or run.routing is None:
            return
        before = brought_bytes(facts, self.assign(facts))
        after = brought_bytes(run, decision.assignment)
        # An expert that comes for later comes all the same.
        for experts in (moves.admit, moves.later):
            before[experts] = after[experts]
        net_bytes = float(before.sum() - after.sum())
        receipts.settle(facts.routing, run.routing, (before - after).clip(0), net_bytes)


def brought_bytes(facts: Facts, assignment: Assignment) -> FloatArray:
    """Return the bytes over link and disk for each expert of an assignment, [num_experts]."""
    size, demand = facts.costs.expert_bytes, facts.demand
    num_bytes = np.zeros(len(facts.is_kept))
    is_absent = np.zeros(len(facts.is_kept), np.bool_)
    is_absent[demand.experts] = ~demand.is_resident
    if facts.arriving_s is not None:
        is_absent[demand.experts[np.isfinite(facts.arriving_s)]] = False
    num_bytes[assignment.fetch] += size * is_absent[assignment.fetch]
    if not facts.has_idle_link and not facts.can_fetch:  # no device: absent is on disk
        num_bytes[assignment.host] += size * is_absent[assignment.host]
    elif facts.is_at_host is not None:
        used = np.concatenate([assignment.fetch, assignment.host])
        num_bytes[used] += size * (is_absent & ~facts.is_at_host)[used]
    return num_bytes


def _promoted(assignment: Assignment, admit: IntArray) -> Assignment:
    """Return the assignment with the host's experts that become resident fetched instead."""
    is_promoted = np.isin(assignment.host, admit)
    fetch = np.sort(np.concatenate([assignment.fetch, assignment.host[is_promoted]]))
    return Assignment(assignment.resident, fetch, assignment.host[~is_promoted])
