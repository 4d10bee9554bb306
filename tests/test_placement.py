"""Placement policies against their published text, and what every policy owes the runtime."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_facts import make_facts

from lowtide.core import BoolArray, Costs, Curve, Demand, Moves, Step, StepKind
from lowtide.errors import UsageError
from lowtide.policies.assignment import HostAlone
from lowtide.policies.decision import Policies
from lowtide.policies.placement import LRU, Placement, Static, Tide
from lowtide.policies.prefetch import NoPrefetch
from lowtide.policies.presets import (
    check_policy,
    choose_preset,
    parse_options,
    preset_names,
    recipe,
)
from lowtide.policies.recipe import Setting
from lowtide.policies.tau import FollowDrift, SolvedTau

NUM_EXPERTS = 12

hits_of_a_step = st.dictionaries(st.integers(0, NUM_EXPERTS - 1), st.integers(1, 5))
steps = st.builds(Step, st.sampled_from(StepKind), st.integers(0, 9))
traces = st.lists(st.tuples(steps, hits_of_a_step), max_size=12)


def denoise(index: int) -> Step:
    return Step(StepKind.DENOISE, index)


class Layer:
    """What the runtime does with a policy's moves, and checks that it can."""

    def __init__(
        self, policy: Placement | Policies, layer: int, capacity: int, num_layers: int = 1
    ) -> None:
        if not isinstance(policy, Policies):
            own = np.full(num_layers, capacity)
            policy = Policies(policy, HostAlone(), NoPrefetch(), own, COSTS)
        self.policy, self.layer, self.capacity = policy, layer, capacity
        initial = policy.placement.initial(layer)
        assert np.array_equal(initial, np.unique(initial))
        assert len(initial) <= capacity
        self.is_resident = np.zeros(NUM_EXPERTS, np.bool_)
        self.is_resident[initial] = True

    @property
    def residents(self) -> set[int]:
        return set(np.flatnonzero(self.is_resident).tolist())

    def step(self, step: Step, hits: Mapping[int, int]) -> Moves:
        experts = np.array(sorted(hits), np.int64)
        num_tokens = np.array([hits[e] for e in experts.tolist()], np.int64)
        demand = Demand(experts, num_tokens, self.is_resident[experts])
        given_state = self.is_resident.copy()
        all_hits = np.zeros((len(self.policy.capacity), NUM_EXPERTS), np.int64)
        all_hits[self.layer, experts] = num_tokens
        num_residents = np.zeros(len(all_hits), np.int64)
        num_residents[self.layer] = len(self.residents)
        self.policy.begin_pass(step, num_residents, self.policy.capacity)
        facts = make_facts(
            demand,
            self.policy.costs,
            step=step,
            layer=self.layer,
            is_kept=self.is_resident,
            capacity=self.policy.capacity,
        )._replace(has_idle_link=False)
        moves = self.policy.moves(facts, self.policy.decide(facts))
        self.policy.end_pass(step, all_hits)
        assert np.array_equal(given_state, self.is_resident), "a policy changes no facts"
        admit, evict = set(moves.admit.tolist()), set(moves.evict.tolist())
        assert len(admit) == len(moves.admit)
        assert len(evict) == len(moves.evict)
        assert admit.isdisjoint(self.residents)
        assert admit <= hits.keys(), "only what is read anyway"
        assert evict <= self.residents
        self.is_resident[moves.evict] = False
        self.is_resident[moves.admit] = True
        assert len(self.residents) <= self.capacity
        return moves


COSTS = Costs(100, 4.0, Curve([(1, 3.0)]), Curve([(1, 1.0)]), Curve([(1, 1.0)]), 0.0)


def make_policies(
    preset: str, options: Mapping[str, str], capacity: Sequence[int], num_experts: int
) -> Policies:
    setting = Setting(capacity, num_experts, COSTS, options=parse_options(preset, options))
    return recipe(preset).policies_without_device(setting)


def make_placement(
    preset: str, options: Mapping[str, str], capacity: Sequence[int], num_experts: int
) -> Placement:
    return make_policies(preset, options, capacity, num_experts).placement


def make(preset: str, capacity: Sequence[int]) -> Policies:
    options = {"tau": "2"} if preset == "tide" else {}
    return make_policies(preset, options, capacity, NUM_EXPERTS)


@pytest.mark.parametrize("preset", ["tide", "lru", "static"])
@given(
    capacities=st.lists(st.integers(0, NUM_EXPERTS), min_size=2, max_size=2),
    trace=st.lists(st.tuples(st.integers(0, 1), steps, hits_of_a_step), max_size=15),
)
def test_every_policy_keeps_its_promises(
    preset: str, capacities: list[int], trace: list[tuple[int, Step, dict[int, int]]]
) -> None:
    policy = make(preset, capacities)
    layers = [Layer(policy, i, capacity) for i, capacity in enumerate(capacities)]
    for which, step, hits in trace:
        untouched = layers[1 - which].residents
        layers[which].step(step, hits)
        assert layers[1 - which].residents == untouched


@pytest.mark.parametrize("preset", ["tide", "lru", "static"])
@given(trace=traces, capacity=st.integers(0, NUM_EXPERTS))
def test_equal_histories_give_equal_decisions(preset: str, trace: list, capacity: int) -> None:  # type: ignore[type-arg]
    layers = [Layer(make(preset, [capacity]), 0, capacity) for _ in range(2)]
    for step, hits in trace:
        one, other = (layer.step(step, hits) for layer in layers)
        assert np.array_equal(one.admit, other.admit)
        assert np.array_equal(one.evict, other.evict)


def top(hits: Mapping[int, int], residents: set[int], capacity: int) -> set[int]:
    """The rule as the paper's text has it: the B most-hit of the union of resident and hit."""
    union = sorted(residents | hits.keys())
    ranked = sorted(union, key=lambda e: (-hits.get(e, 0), e not in residents, e))
    return set(ranked[:capacity])


@given(
    trace=traces,
    capacity=st.integers(0, NUM_EXPERTS),
    tau=st.integers(1, 5),
    starts_empty=st.booleans(),
)
def test_tide_is_its_text(
    trace: list,  # type: ignore[type-arg]
    capacity: int,
    tau: int,
    starts_empty: bool,
) -> None:
    layer = Layer(Tide(1, NUM_EXPERTS, tau, starts_empty), 0, capacity)
    assert not layer.residents
    for step, hits in trace:
        before = layer.residents
        moves = layer.step(step, hits)
        is_left_out = starts_empty and step.kind is StepKind.PREFILL
        if is_left_out or step.index % tau != 0:
            assert not len(moves.admit)
            assert not len(moves.evict)
        else:
            assert layer.residents == top(hits, before, capacity)


def test_tide_refreshes_at_multiples_of_tau_only() -> None:
    layer = Layer(Tide(1, NUM_EXPERTS, tau=3), 0, 2)
    changed = []
    for index in range(10):
        moves = layer.step(denoise(index), {index: 5, index + 1: 4, index + 2: 1})
        if len(moves.admit):
            changed.append(index)
            assert layer.residents == {index, index + 1}
    assert changed == [0, 3, 6, 9]


def test_tide_starts_from_what_the_first_pass_demands_unless_it_starts_empty() -> None:
    layer = Layer(Tide(1, NUM_EXPERTS, tau=2), 0, 2)
    layer.step(Step(StepKind.PREFILL, 0), {1: 9, 2: 9, 3: 1})
    assert layer.residents == {1, 2}
    layer.step(Step(StepKind.PREFILL, 1), {4: 9, 5: 9})  # step 1 would not refresh
    assert layer.residents == {1, 2}
    layer = Layer(Tide(1, NUM_EXPERTS, tau=1, starts_empty=True), 0, 2)
    layer.step(Step(StepKind.PREFILL, 0), {1: 9, 2: 9})
    assert layer.residents == set()
    layer.step(denoise(0), {3: 1, 4: 1})
    assert layer.residents == {3, 4}


def test_tide_counts_this_step_and_no_history() -> None:
    layer = Layer(Tide(1, NUM_EXPERTS, tau=1), 0, 1)
    layer.step(denoise(0), {7: 100})
    layer.step(denoise(1), {2: 1})
    assert layer.residents == {2}


def test_tide_breaks_ties_by_residence_then_by_lower_id() -> None:
    layer = Layer(Tide(1, NUM_EXPERTS, tau=1), 0, 3)
    layer.step(denoise(0), {9: 2, 5: 2, 7: 2, 11: 2})
    assert layer.residents == {5, 7, 9}
    layer.step(denoise(1), {0: 2, 9: 2, 1: 2, 3: 1})  # 9 stays; 0 and 1 have more than 5 and 7
    assert layer.residents == {0, 1, 9}
    layer.step(denoise(2), {2: 1})  # whom nothing displaces stays
    assert layer.residents == {0, 1, 2}


def test_tide_fills_up_and_keeps_residents_that_were_not_hit() -> None:
    layer = Layer(Tide(1, NUM_EXPERTS, tau=1), 0, 4)
    layer.step(denoise(0), {3: 1, 4: 1})
    layer.step(denoise(1), {8: 1})
    assert layer.residents == {3, 4, 8}


@given(
    capacities=st.lists(st.integers(0, NUM_EXPERTS), min_size=1, max_size=3),
    trace=st.lists(st.tuples(st.integers(0, 2), hits_of_a_step), max_size=20),
)
def test_lru_is_an_ordinary_lru_cache_per_layer(
    capacities: list[int], trace: list[tuple[int, dict[int, int]]]
) -> None:
    policy, num_layers = LRU(len(capacities), NUM_EXPERTS), len(capacities)
    layers = [Layer(policy, i, capacity, num_layers) for i, capacity in enumerate(capacities)]
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in capacities]
    for i, (which, hits) in enumerate(trace):
        which %= len(capacities)
        layers[which].step(Step(list(StepKind)[i % 3], i), hits)
        cache = caches[which]
        for expert in sorted(hits):
            cache[expert] = None
            cache.move_to_end(expert)
            if len(cache) > capacities[which]:
                cache.popitem(last=False)
        assert layers[which].residents == set(cache)


@given(trace=traces, capacity=st.integers(0, NUM_EXPERTS))
def test_static_never_moves(trace: list, capacity: int) -> None:  # type: ignore[type-arg]
    layer = Layer(Static.first([capacity], NUM_EXPERTS), 0, capacity)
    assert layer.residents == set(range(capacity))
    for step, hits in trace:
        layer.step(step, hits)
        assert layer.residents == set(range(capacity))


def test_static_keeps_what_it_is_told() -> None:
    chosen = [np.array([2, 5]), np.array([], np.int64)]
    policy = Static(chosen, NUM_EXPERTS)
    assert Layer(policy, 0, 2).residents == {2, 5}
    assert Layer(policy, 1, 0, num_layers=2).residents == set()


def test_presets_make_what_they_name() -> None:
    assert isinstance(make_placement("tide", {}, [3], NUM_EXPERTS), Tide)
    assert isinstance(make_placement("lru", {}, [3], NUM_EXPERTS), LRU)
    everyone = list(range(NUM_EXPERTS))
    for name, first in (("static", [0, 1, 2]), ("resident", everyone), ("all-host", [])):
        assert make_placement(name, {}, [3], NUM_EXPERTS).initial(0).tolist() == first


def test_tau_reaches_the_policy() -> None:
    for options, refreshes in (({}, [0, 4, 8]), ({"tau": "3"}, [0, 3, 6, 9])):
        layer = Layer(make_placement("tide", options, [1], NUM_EXPERTS), 0, 1)
        moved = [index for index in range(10) if len(layer.step(denoise(index), {index: 1}).admit)]
        assert moved == refreshes


def test_auto_is_resident_if_everything_fits_else_what_suits_the_decoding() -> None:
    assert choose_preset("auto", everything_fits=True)[0] == "resident"
    assert choose_preset("auto", everything_fits=False)[0] == "lowtide"
    for name in set(preset_names()) - {"auto"}:
        assert choose_preset(name, everything_fits=True)[0] == name
    for name in set(preset_names()) - {"auto", "resident"}:
        assert choose_preset(name, everything_fits=False)[0] == name
    assert choose_preset("auto", everything_fits=False, has_device=True)[0] == "lowtide"
    with pytest.raises(UsageError, match="full_bytes.*--policy tide"):
        choose_preset("resident", everything_fits=False)


@pytest.mark.parametrize("name", ["", "Tide", "mru", "tide "])
def test_unknown_policies_are_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name!r} is not known.*tide.*lru"):
        check_policy(name, {})


@pytest.mark.parametrize(("name", "options"), [("tide", {"tua": "4"}), ("lru", {"tau": "4"})])
def test_unknown_options_are_refused_by_name(name: str, options: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=f"{name!r} has no option {next(iter(options))!r}"):
        check_policy(name, options)


@pytest.mark.parametrize("tau", ["0", "-1", "4.0", "", "four", "1e3", "1000000", "9" * 5000, "²"])
def test_a_wrong_tau_is_refused(tau: str) -> None:
    with pytest.raises(
        UsageError, match="tau must be a whole number from 1 to 999999, or auto, or paper"
    ):
        check_policy("tide", {"tau": tau})


@pytest.mark.parametrize("tau", ["1", "4", "999999"])
def test_a_right_tau_is_taken(tau: str) -> None:
    check_policy("tide", {"tau": tau})
    check_policy("auto", {"tau": tau})
    assert parse_options("tide", {"tau": tau}) == {"tau": int(tau)}


def test_tau_may_follow_the_drift() -> None:
    assert parse_options("tide", {"tau": "auto"}) == {"tau": FollowDrift()}
    assert parse_options("auto", {"tau": "paper"}) == {"tau": SolvedTau.PAPER}
    check_policy("lowtide", {"tau": "auto", "num_prefetch": "0"})


WITHIN_CAPACITY = sorted(set(preset_names()) - {"auto", "resident", "layer-split"})


@pytest.mark.parametrize("preset", WITHIN_CAPACITY)
@given(trace=traces, capacity=st.integers(0, NUM_EXPERTS))
def test_with_one_processor_every_preset_admits_only_what_is_read_anyway(
    preset: str,
    trace: list,  # type: ignore[type-arg]
    capacity: int,
) -> None:
    layer = Layer(make_policies(preset, {}, [capacity], NUM_EXPERTS), 0, capacity)
    for step, hits in trace:
        layer.step(step, hits)


def test_policies_and_the_plan_import_no_torch() -> None:
    program = (
        "import sys, lowtide.policies.placement, lowtide.policies.presets, lowtide.memory.budget;"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def bools(*values: int) -> BoolArray:
    return np.array(values, np.bool_)


def test_an_empty_demand_moves_nothing_out() -> None:
    nothing = np.empty(0, np.int64)
    demand = Demand(nothing, nothing, bools())
    facts = make_facts(demand, is_kept=bools(1, 1, 0, 0))
    for policy in (Tide(1, 4, 1), LRU(1, 4), Static.first([2], 4)):
        moves = policy.update(facts)
        assert not len(moves.admit)
        assert not len(moves.evict)
