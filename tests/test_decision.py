"""Waits of a layer's work, and decisions while it is under way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lowtide.core import Assignment, Costs, Demand, Facts, IntArray, Moves, Step, StepKind
from lowtide.errors import InternalError
from lowtide.policies.assignment import HostAlone
from lowtide.policies.decision import Policies
from lowtide.policies.prefetch import NoPrefetch
from lowtide.policies.ranks import Ranks, of_those

STEP = Step(StepKind.DENOISE, 0)
DEMAND = Demand(np.array([1, 4, 6]), np.array([3, 1, 2]), np.array([True, False, False]))
FACTS = Facts(
    step=STEP,
    layer=3,
    demand=DEMAND,
    is_kept=np.isin(np.arange(8), [1, 2]),
    capacity=np.full(4, 2),
    costs=Costs.unknown(1),
    arriving_s=np.full(3, np.inf),
)


class Recorder:
    """A placement that admits expert 4 and notes what it is asked; the device fetches 6."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def initial(self, layer: int) -> IntArray:
        return np.array([1, 2])

    def begin_pass(self, step: Step, num_residents: IntArray, capacity: IntArray) -> Ranks:
        assert step == FACTS.step and capacity is FACTS.capacity
        self.asked.append(f"begin with {num_residents.tolist()}")
        rank = np.zeros((4, 8))
        rank[3, 2] = 4
        return Ranks(rank, capacity, per_expert=3, per_token=1)

    def end_pass(self, step: Step, hits: IntArray) -> None:
        assert step == FACTS.step
        self.asked.append(f"end with {hits.tolist()}")

    def update(self, facts: Facts) -> Moves:
        assert facts._replace(fetched=FACTS.fetched, can_fetch=True, has_idle_link=True) == FACTS
        self.asked.append(f"update, fetched {facts.fetched.tolist()}")
        return Moves(np.array([4]), np.array([2]))

    def __call__(self, facts: Facts) -> Assignment:
        self.asked.append("assign")
        experts = facts.demand.experts
        return Assignment(experts[:1], experts[2:], experts[1:2])


def make_policies(recorder: Recorder, waits: bool = False) -> Policies:
    capacity, costs = FACTS.capacity, FACTS.costs
    return Policies(recorder, recorder, NoPrefetch(), capacity, costs, waits)


def test_moves_that_nothing_waits_for_are_asked_for_afterwards() -> None:
    recorder = Recorder()
    policies = make_policies(recorder)
    decision = policies.decide(FACTS)
    assert recorder.asked == ["assign"]
    assert [part.tolist() for part in decision.assignment[:3]] == [[1], [6], [4]]
    moves = policies.moves(FACTS, decision)
    assert recorder.asked == ["assign", "update, fetched [6]"]
    assert [part.tolist() for part in moves[:2]] == [[4], [2]]


def test_a_step_that_waits_for_its_moves_knows_them_first() -> None:
    recorder = Recorder()
    policies = make_policies(recorder, waits=True)
    decision = policies.decide(FACTS)
    assert recorder.asked == ["update, fetched []", "assign"]
    assert [part.tolist() for part in decision.assignment[:3]] == [[1], [4, 6], []]
    assert policies.moves(FACTS, decision) is decision.moves
    assert recorder.asked == ["update, fetched []", "assign"]


def test_what_cannot_be_fetched_is_not_waited_for() -> None:
    decision = make_policies(Recorder(), waits=True).decide(FACTS._replace(can_fetch=False))
    assert decision.assignment.host.tolist() == [4] and decision.moves is not None


def test_without_a_device_every_absent_expert_is_brought_and_no_other() -> None:
    recorder = Recorder()
    policies = replace(make_policies(recorder), assign=HostAlone())
    facts = FACTS._replace(has_idle_link=False)
    decision = policies.decide(facts)
    assert [part.tolist() for part in decision.assignment[:3]] == [[], [], [1, 4, 6]]
    with pytest.raises(InternalError, match="before a pass has begun"):
        policies.moves(facts, decision)
    ranks = policies.begin_pass(STEP, np.array([0, 0, 0, 2]), FACTS.capacity)
    # 1 comes to 6 and is demanded as well; 6 to 5, which is more than 2 has, and 4 to 4.
    assert [part.tolist() for part in policies.moves(facts, decision)[:3]] == [[6], [2], []]
    assert ranks.rank[3].tolist() == [0, 6, 4, 0, 4, 0, 5, 0]
    policies.end_pass(STEP, np.array([[1, 2]]))
    assert recorder.asked == ["begin with [0, 0, 0, 2]", "end with [[1, 2]]"]


@pytest.mark.parametrize(
    ("admit", "evict", "left"),
    [
        ([4, 6], [1, 2], ([4, 6], [1, 2])),
        ([3, 4], [1, 2], ([4], [2])),  # whom 3 would have replaced stays
        ([3, 5], [1], ([], [])),
        ([3], [1, 2], ([], [2])),  # room was lost: one has to go all the same
        ([], [1, 2], ([], [1, 2])),
    ],
)
def test_moves_of_others_than_are_fetched_are_left_out(
    admit: list[int], evict: list[int], left: tuple[list[int], list[int]]
) -> None:
    moves = of_those(Moves(np.array(admit, np.int64), np.array(evict, np.int64)), DEMAND.experts)
    assert (moves.admit.tolist(), moves.evict.tolist()) == left
