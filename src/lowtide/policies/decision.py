"""What the policies of one preset decide together, for one layer of one step.

The same object is driven by the runtime and by the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lowtide.core import Assignment, BoolArray, Demand, FloatArray, IntArray, Moves, Step
from lowtide.policies.assignment import Assign
from lowtide.policies.placement import KeepsFetched, Placement
from lowtide.policies.prefetch import Prefetch


class Decision(NamedTuple):
    """What has to be known before a layer's work starts."""

    assignment: Assignment
    moves: Moves | None  # None: nothing waits for them, `Policies.moves` will tell


@dataclass(frozen=True, slots=True)
class Policies:
    """A preset at work: its three policies, made for one model and one budget.

    waits: whether a step waits for the experts its placement admits (TIDE's Eq. 3) and runs them
    on the device, or computes them where they are and lets the moves follow (TIDE's Algorithm 1).
    """

    placement: Placement
    assign: Assign
    prefetch: Prefetch
    waits: bool = False
    _keeper: KeepsFetched | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Asked once: a protocol takes 9 us to tell who keeps to it.
        keeper = self.placement if isinstance(self.placement, KeepsFetched) else None
        object.__setattr__(self, "_keeper", keeper)

    def decide(
        self,
        layer: int,
        step: Step,
        demand: Demand,
        is_kept: BoolArray,
        arriving_s: FloatArray,
        link_s: float,
        can_fetch: bool,
    ) -> Decision:
        """Who computes what, after a layer's router.

        is_kept [num_experts]: residents, and those on their way to be. arriving_s
        [len(demand.experts)]: seconds until each can be used, infinite if nothing is under way.
        link_s: seconds until the link is free for a fetch.
        """
        if self.waits:
            moves = self.placement.update(step, layer, demand, is_kept)
            assignment = self.assign(layer, demand, arriving_s, link_s)
            return Decision(_promoted(assignment, moves.admit) if can_fetch else assignment, moves)
        return Decision(self.assign(layer, demand, arriving_s, link_s), None)

    def moves(
        self, layer: int, step: Step, demand: Demand, is_kept: BoolArray, decision: Decision
    ) -> Moves:
        """What is resident from now on; asked once, when the work of `decision` is under way.

        is_kept [num_experts]: as `decide` was told.
        """
        if decision.moves is not None:
            return decision.moves
        if self._keeper is not None:
            self._keeper.fetched(layer, decision.assignment.fetch)
        return self.placement.update(step, layer, demand, is_kept)


def _promoted(assignment: Assignment, admit: IntArray) -> Assignment:
    """The host's experts that become resident now are waited for instead."""
    is_promoted = np.isin(assignment.host, admit)
    fetch = np.sort(np.concatenate([assignment.fetch, assignment.host[is_promoted]]))
    return Assignment(assignment.resident, fetch, assignment.host[~is_promoted])
