"""Room that shrinks and grows while a model runs: what every preset does about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from policy_facts import make_facts

from lowtide.core import BoolArray, Costs, Curve, Demand, Facts, IntArray, Moves, Step, StepKind
from lowtide.policies.budgets import Budgets
from lowtide.policies.catalogue import CATALOGUE
from lowtide.policies.decision import Policies
from lowtide.policies.presets import recipe
from lowtide.policies.recipe import PolicyInputs
from lowtide.policies.tau import FollowDrift

COSTS = Costs(10, 6.0, Curve([(1, 8.0)]), Curve([(1, 1.0)]), Curve([(1, 2.0)]), 0.0)
CASES: list[tuple[str, Mapping[str, Any]]] = [
    *((name, {}) for name in sorted(CATALOGUE)),
    ("tide", {"tau": 3, "waits": True}),
    ("tide", {"tau": FollowDrift(2)}),
    ("lowtide", {"tau": FollowDrift(2), "max_step_bytes": 10}),
]


class Machine:
    """Residents of some layers, which follow all moves at once."""

    def __init__(self, policies: Policies, num_experts: int, has_idle_link: bool) -> None:
        self.policies = policies
        self.capacity = policies.capacity
        self.is_kept = np.zeros((len(self.capacity), num_experts), np.bool_)
        for layer, kept in enumerate(self.is_kept):
            kept[policies.placement.initial(layer)] = True
        self.has_idle_link = has_idle_link
        assert (self.is_kept.sum(axis=1) <= self.capacity).all()

    def run_pass(self, step: Step, hits: IntArray) -> None:
        """Hits [layers, experts]."""
        if not self.has_idle_link:
            num_residents = self.is_kept.sum(axis=1)
            self.policies.begin_pass(step, num_residents, self.capacity)
        for layer, of_layer in enumerate(hits):
            self.run_layer(step, layer, of_layer)
        if not self.has_idle_link:
            self.policies.end_pass(step, hits)

    def run_layer(self, step: Step, layer: int, hits: IntArray) -> Moves:
        kept, experts = self.is_kept[layer], np.flatnonzero(hits)
        demand = Demand(experts, hits[experts], kept[experts])
        facts = make_facts(
            demand, COSTS, step=step, layer=layer, is_kept=kept.copy(), capacity=self.capacity
        )._replace(has_idle_link=self.has_idle_link)
        decision = self.policies.decide(facts)
        placed = np.concatenate(decision.assignment[:3])
        assert np.array_equal(np.sort(placed), experts)
        moves = self.policies.moves(facts, decision)
        self._follow(moves, kept, facts)
        return moves

    def _follow(self, moves: Moves, kept: BoolArray, facts: Facts) -> None:
        assert np.array_equal(facts.is_kept, kept), "a policy changes no facts"
        for part in moves[:3]:
            assert len(np.unique(part)) == len(part)
        assert not kept[moves.admit].any() and kept[moves.evict].all()
        assert self.has_idle_link or np.isin(moves.admit, facts.demand.experts).all()
        kept[moves.admit] = True
        kept[moves.evict] = False


@pytest.mark.parametrize("has_device", [True, False])
@pytest.mark.parametrize(("preset", "options"), CASES)
@examples(20)
@given(
    seed=st.integers(0, 10**6),
    num_layers=st.integers(1, 4),
    num_experts=st.integers(1, 9),
    is_calibrated=st.booleans(),
)
def test_no_more_stays_than_there_is_room_for_now(
    preset: str,
    options: Mapping[str, Any],
    has_device: bool,
    seed: int,
    num_layers: int,
    num_experts: int,
    is_calibrated: bool,
) -> None:
    draw = np.random.default_rng(seed)
    hits = draw.poisson(0.7, (5, num_layers, num_experts)) if is_calibrated else None
    frequency = None if hits is None else (hits > 0).sum(axis=0).astype(np.float64)
    capacity = draw.integers(0, num_experts + 1, num_layers).tolist()
    setting = PolicyInputs(capacity, num_experts, COSTS, frequency, hits=hits, options=options)
    made = recipe(preset)
    policies = made.policies(setting) if has_device else made.policies_without_device(setting)
    machine = Machine(policies, num_experts, has_idle_link=has_device)
    for index in range(12):
        if draw.random() < 0.5:
            machine.capacity = draw.integers(0, num_experts + 1, num_layers)
        step = Step(StepKind(draw.choice([kind.value for kind in StepKind])), index)
        machine.run_pass(step, draw.poisson(1.0, (num_layers, num_experts)))
        if preset not in ("lowtide", "buddymoe"):  # which divide what there is among their layers
            assert (machine.is_kept.sum(axis=1) <= machine.capacity).all()
        assert machine.is_kept.sum() <= machine.capacity.sum()


@pytest.mark.parametrize("preset", ["resident", "static", "fiddler", "layer-split"])
def test_what_was_lost_comes_back_with_the_room(preset: str) -> None:
    policies = recipe(preset).policies(PolicyInputs([3, 5], 5, COSTS))
    machine = Machine(policies, 5, has_idle_link=True)
    before, all_hit = machine.is_kept.copy(), np.ones(5, np.int64)
    for capacity in ([1, 0], policies.capacity):
        machine.capacity = np.array(capacity)
        for layer in (0, 1):
            machine.run_layer(Step(StepKind.DECODE, 0), layer, all_hit)
        assert machine.is_kept.sum(axis=1).tolist() == np.minimum(capacity, before.sum(1)).tolist()
    assert np.array_equal(machine.is_kept, before)


def test_lowtide_keeps_how_it_has_divided_its_slots() -> None:
    held = Budgets([4, 4], 8)
    for _ in range(2):
        held.begin_step(lambda: np.array([[9.0] * 8, [0.0] * 8]))
    held.settle(np.array([4, 4]))
    assert held.capacity.tolist() == [4, 3]
    held.settle(np.array([4, 3]))
    assert held.capacity.tolist() == [5, 3]
    held.resize(np.array([2, 4]))
    assert held.capacity.tolist() == [3, 3]
    held.resize(np.array([0, 2]))
    assert held.capacity.sum() == 2
    held.resize(np.array([4, 4]))  # what is won has to come free first
    held.settle(np.array([5, 3]))
    assert held.capacity.sum() == 2
    held.settle(np.array([0, 0]))
    assert held.capacity.sum() == 8
