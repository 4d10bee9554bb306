"""What every placement promises, with the policies of a recipe or alone.

A placement that is added gets a row: in `RECIPES` if its policy is not registered, and in `RULES`
with its oracle, the rule of its paper or docstring, which is asked layer by layer and decides with
sets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from policy_facts import make_facts
from stranger_parts import policies as stranger

from lowtide.core import (
    BoolArray,
    Costs,
    Curve,
    Demand,
    Facts,
    FloatArray,
    IntArray,
    Moves,
    Step,
    StepKind,
)
from lowtide.lab.baselines import Frequency, ScoreCache
from lowtide.policies.catalogue import CATALOGUE
from lowtide.policies.decision import Policies
from lowtide.policies.placement import LRU, DaliWindow, Placement, Static, Tide
from lowtide.policies.presets import recipe
from lowtide.policies.ranks import admit
from lowtide.policies.recipe import PolicyInputs, Recipe
from lowtide.policies.tau import FollowDrift

NUM_LAYERS, NUM_EXPERTS = 2, 8
COUNTS = np.array([[5, 0, 9, 9, 1, 2, 2, 0], [0, 0, 0, 0, 0, 0, 0, 0]], np.float64)


class Asked(NamedTuple):
    """Facts given to an old rule: of one layer in one pass."""

    step: Step
    number: int  # of the pass, from 0
    layer: int
    hits: IntArray
    is_kept: BoolArray
    room: int

    @property
    def is_demanded(self) -> BoolArray:
        return self.hits > 0

    def best(self, score: FloatArray | IntArray, candidates: BoolArray) -> set[int]:
        """As many as there is room for; residents, then lower ids, win ties."""
        ids = candidates.nonzero()[0].tolist()
        return set(sorted(ids, key=lambda e: (-score[e], not self.is_kept[e], e))[: self.room])

    def at_most(self, score: FloatArray | IntArray) -> set[int]:
        """Of least score, lower ids leave first."""
        ids = self.is_kept.nonzero()[0].tolist()
        leaving = sorted(ids, key=lambda e: (score[e], e))[: max(0, len(ids) - self.room)]
        return set(ids) - set(leaving)


Rule = Callable[[Asked], set[int]]


def best_of(orders: list[list[int]]) -> Rule:
    """The first ones for whom there is room, once they are read; till then those who were here."""

    def rule(asked: Asked) -> set[int]:
        worth = np.zeros(NUM_EXPERTS)
        order = orders[asked.layer][: asked.room]
        worth[order] = range(len(order), 0, -1)
        return asked.best(worth, asked.is_kept | (asked.is_demanded & (worth > 0)))

    return rule


def static() -> Rule:
    return best_of([list(range(5))] * NUM_LAYERS)


def favourite() -> Rule:
    return best_of((-COUNTS).argsort(axis=1, kind="stable").tolist())


def lru() -> Rule:
    last_use = np.full((NUM_LAYERS, NUM_EXPERTS), -1)
    uses = iter(range(10**6))

    def rule(asked: Asked) -> set[int]:
        for expert in asked.is_demanded.nonzero()[0]:
            last_use[asked.layer, expert] = next(uses)
        return asked.best(last_use[asked.layer], asked.is_kept | asked.is_demanded)

    return rule


def tide(starts_empty: bool) -> Rule:
    def rule(asked: Asked) -> set[int]:
        is_left_out = starts_empty and asked.step.kind is StepKind.PREFILL
        if not is_left_out and asked.step.index % 3 == 0:
            return asked.best(asked.hits, asked.is_kept | asked.is_demanded)
        return asked.at_most(asked.hits)

    return rule


def frequency() -> Rule:
    counts = COUNTS.copy()

    def rule(asked: Asked) -> set[int]:
        counts[asked.layer] += asked.is_demanded
        return asked.best(counts[asked.layer], asked.is_kept | asked.is_demanded)

    return rule


def score() -> Rule:
    means = np.zeros((NUM_LAYERS, NUM_EXPERTS))

    def rule(asked: Asked) -> set[int]:
        means[asked.layer] *= 0.5
        means[asked.layer] += 0.5 * asked.hits / max(1, asked.hits.sum())
        return asked.best(means[asked.layer], asked.is_kept | asked.is_demanded)

    return rule


def dali(always: bool) -> Rule:
    """With no room lost, since a swap follows that loss now. always: as the paper prints it."""
    scores = np.zeros((NUM_LAYERS, NUM_EXPERTS), np.int64)

    def rule(asked: Asked) -> set[int]:
        now, kept = scores[asked.layer], set(asked.is_kept.nonzero()[0].tolist())
        now += asked.hits
        if asked.number % 2 == 0:
            return kept
        absent = [e for e in range(NUM_EXPERTS) if e not in kept and (always or now[e] > 0)]
        entering = sorted(absent, key=lambda e: (-now[e], e))[:3]
        num_free = asked.room - len(kept)
        leaving = sorted(kept, key=lambda e: (now[e], e))
        pairs = zip(entering[num_free:], leaving, strict=False)
        swaps = [(e, r) for e, r in pairs if always or now[e] > now[r]]
        entering = entering[: num_free + len(swaps)]
        now[:] = 0
        # Nobody is read who is not demanded: as many of those who were to leave stay.
        coming = {e for e in entering if asked.hits[e]}
        evicted = sorted(r for _, r in swaps)[len(entering) - len(coming) :]
        return kept - set(evicted) | coming

    return rule


def newest() -> Rule:
    numbers = np.zeros((NUM_LAYERS, NUM_EXPERTS))

    def rule(asked: Asked) -> set[int]:
        numbers[asked.layer] *= 0.5
        numbers[asked.layer] += 2 * asked.is_demanded
        return asked.best(numbers[asked.layer], asked.is_kept | asked.is_demanded)

    return rule


RULES: dict[str, tuple[Callable[[list[int]], Placement], Callable[[], Rule]]] = {
    "static": (lambda room: Static([np.arange(5)] * 2, NUM_EXPERTS, room), static),
    "favourites": (lambda room: Static.favourites(room, COUNTS), favourite),
    "lru": (lambda room: LRU(NUM_LAYERS, NUM_EXPERTS), lru),
    "tide": (lambda room: Tide(NUM_LAYERS, NUM_EXPERTS, 3), lambda: tide(False)),
    "tide, empty": (lambda room: Tide(NUM_LAYERS, NUM_EXPERTS, 3, True), lambda: tide(True)),
    "frequency": (lambda room: Frequency(room, COUNTS), frequency),
    "score": (lambda room: ScoreCache(room, NUM_EXPERTS), score),
    "dali": (lambda room: DaliWindow(room, NUM_EXPERTS, 2, 3, seed=1), lambda: dali(True)),
    "dali, better": (
        lambda room: DaliWindow(room, NUM_EXPERTS, 2, 3, seed=1, always=False),
        lambda: dali(False),
    ),
    "newest": (lambda room: stranger.Newest(room, NUM_EXPERTS, 2), newest),
}
"""By name: a placement for the room of each layer, and the rule that it follows."""

rooms = st.lists(st.integers(0, NUM_EXPERTS), min_size=NUM_LAYERS, max_size=NUM_LAYERS)
tokens = st.lists(st.integers(0, 3), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS)
passes = st.tuples(
    st.builds(Step, st.sampled_from(StepKind), st.integers(0, 7)),
    st.lists(tokens, min_size=NUM_LAYERS, max_size=NUM_LAYERS),
    st.none() | rooms,
)


@pytest.mark.parametrize("name", RULES)
@examples(80)
@given(room=rooms, trace=st.lists(passes, max_size=12))
def test_decisions_are_those_of_the_rule(name: str, room: list[int], trace: list) -> None:
    make, make_rule = RULES[name]
    placement, rule = make(room), make_rule()
    is_kept = np.zeros((NUM_LAYERS, NUM_EXPERTS), np.bool_)
    for layer in range(NUM_LAYERS):
        is_kept[layer, placement.initial(layer)] = True
    for number, (step, all_tokens, new_room) in enumerate(trace):
        if new_room is not None and not name.startswith("dali"):
            room = new_room
        hits = np.array(all_tokens)
        ranks = placement.begin_pass(step, is_kept.sum(axis=1), np.array(room))
        for layer, now in enumerate(hits):
            wanted = rule(Asked(step, number, layer, now, is_kept[layer].copy(), room[layer]))
            experts = now.nonzero()[0]
            moves = admit(ranks, layer, experts, now[experts], is_kept[layer])
            is_kept[layer, moves.admit] = True
            is_kept[layer, moves.evict] = False
            assert set(is_kept[layer].nonzero()[0].tolist()) == wanted
        placement.end_pass(step, hits)


# Policies of recipes


COSTS = Costs(10, 6.0, Curve([(1, 8.0)]), Curve([(1, 1.0)]), Curve([(1, 2.0)]), 0.0)
RECIPES: Mapping[str, Recipe] = {
    **{name: recipe(name) for name in CATALOGUE},
    "newest": stranger.NEWEST,
}
CASES: list[tuple[str, Mapping[str, Any]]] = [
    *((name, {"miss": "wait"} if name == "buddymoe" else {}) for name in sorted(RECIPES)),
    ("tide", {"tau": 3, "waits": True}),
    ("tide", {"tau": FollowDrift(2)}),
    ("lowtide", {"tau": FollowDrift(2), "max_step_bytes": 10}),
]


def policies_of(name: str, setting: PolicyInputs, has_device: bool) -> Policies:
    made = RECIPES[name]
    return made.policies(setting) if has_device else made.policies_without_device(setting)


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
@pytest.mark.parametrize(("name", "options"), CASES)
@examples(20)
@given(
    seed=st.integers(0, 10**6),
    num_layers=st.integers(1, 4),
    num_experts=st.integers(1, 9),
    is_calibrated=st.booleans(),
)
def test_no_more_stays_than_there_is_room_for_now(
    name: str,
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
    machine, twin = (
        Machine(policies_of(name, setting, has_device), num_experts, has_idle_link=has_device)
        for _ in range(2)
    )
    for index in range(12):
        if draw.random() < 0.5:
            machine.capacity = draw.integers(0, num_experts + 1, num_layers)
        step = Step(StepKind(draw.choice([kind.value for kind in StepKind])), index)
        asked = draw.poisson(1.0, (num_layers, num_experts))
        for each in (machine, twin):
            each.capacity = machine.capacity
            each.run_pass(step, asked)
        assert np.array_equal(machine.is_kept, twin.is_kept), "a policy is pure"
        if name not in ("lowtide", "buddymoe"):  # which divide what there is among their layers
            assert (machine.is_kept.sum(axis=1) <= machine.capacity).all()
        assert machine.is_kept.sum() <= machine.capacity.sum()


@pytest.mark.parametrize("preset", ["resident", "static", "fiddler", "layer-split"])
def test_what_was_lost_comes_back_with_the_room(preset: str) -> None:
    policies = policies_of(preset, PolicyInputs([3, 5], 5, COSTS), has_device=True)
    machine = Machine(policies, 5, has_idle_link=True)
    before, all_hit = machine.is_kept.copy(), np.ones(5, np.int64)
    for capacity in ([1, 0], policies.capacity):
        machine.capacity = np.array(capacity)
        for layer in (0, 1):
            machine.run_layer(Step(StepKind.DECODE, 0), layer, all_hit)
        assert machine.is_kept.sum(axis=1).tolist() == np.minimum(capacity, before.sum(1)).tolist()
    assert np.array_equal(machine.is_kept, before)
