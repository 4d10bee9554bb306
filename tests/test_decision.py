"""What a layer's work waits for, and what is decided while it is under way."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowtide.core import Assignment, BoolArray, Demand, IntArray, Moves, Step, StepKind
from lowtide.policies.decision import Decision, Policies
from lowtide.policies.prefetch import NoPrefetch

STEP = Step(StepKind.DENOISE, 0)
DEMAND = Demand(np.array([1, 4, 6]), np.array([3, 1, 2]), np.array([True, False, False]))
IS_KEPT = np.isin(np.arange(8), [1, 2])


class Recorder:
    """A placement that admits expert 4 and notes what it is asked; the device fetches 6."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def initial(self, layer: int) -> IntArray:
        return np.array([1, 2])

    def fetched(self, layer: int, experts: IntArray) -> None:
        self.asked.append(f"fetched {experts.tolist()}")

    def update(self, step: Step, layer: int, demand: Demand, is_resident: BoolArray) -> Moves:
        assert (step, layer) == (STEP, 3) and demand is DEMAND and is_resident is IS_KEPT
        self.asked.append("update")
        return Moves(np.array([4]), np.array([2]))

    def __call__(self, layer: int, demand: Demand, *_: Any) -> Assignment:
        self.asked.append("assign")
        return Assignment(demand.experts[:1], demand.experts[2:], demand.experts[1:2])


def decide(policies: Policies, can_fetch: bool = True) -> Decision:
    return policies.decide(3, STEP, DEMAND, IS_KEPT, np.full(3, np.inf), 0.0, can_fetch)


def test_moves_that_nothing_waits_for_are_asked_for_afterwards() -> None:
    recorder = Recorder()
    policies = Policies(recorder, recorder, NoPrefetch())
    decision = decide(policies)
    assert recorder.asked == ["assign"]
    assert [part.tolist() for part in decision.assignment[:3]] == [[1], [6], [4]]
    moves = policies.moves(3, STEP, DEMAND, IS_KEPT, decision)
    assert recorder.asked == ["assign", "fetched [6]", "update"]
    assert [part.tolist() for part in moves] == [[4], [2]]


def test_a_step_that_waits_for_its_moves_knows_them_first() -> None:
    recorder = Recorder()
    policies = Policies(recorder, recorder, NoPrefetch(), waits=True)
    decision = decide(policies)
    assert recorder.asked == ["update", "assign"]
    assert [part.tolist() for part in decision.assignment[:3]] == [[1], [4, 6], []]
    assert policies.moves(3, STEP, DEMAND, IS_KEPT, decision) is decision.moves
    assert recorder.asked == ["update", "assign"]


def test_what_cannot_be_fetched_is_not_waited_for() -> None:
    recorder = Recorder()
    decision = decide(Policies(recorder, recorder, NoPrefetch(), waits=True), can_fetch=False)
    assert decision.assignment.host.tolist() == [4] and decision.moves is not None
