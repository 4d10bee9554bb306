"""Presets and their options; what placements do is in test_contract_placement.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from policy_facts import make_facts

from lowtide.core import BoolArray, Costs, Curve, Demand, Step, StepKind
from lowtide.errors import UsageError
from lowtide.policies.placement import LRU, Placement, Static, Tide
from lowtide.policies.presets import (
    check_policy,
    choose_preset,
    parse_options,
    preset_names,
    recipe,
)
from lowtide.policies.recipe import PolicyInputs
from lowtide.policies.tau import FollowDrift, SolvedTau

NUM_EXPERTS = 12
COSTS = Costs(100, 4.0, Curve([(1, 3.0)]), Curve([(1, 1.0)]), Curve([(1, 1.0)]), 0.0)


def make_placement(preset: str, options: Mapping[str, str], capacity: Sequence[int]) -> Placement:
    setting = PolicyInputs(capacity, NUM_EXPERTS, COSTS, options=parse_options(preset, options))
    return recipe(preset).policies_without_device(setting).placement


def test_static_keeps_what_it_is_told() -> None:
    chosen = [np.array([2, 5]), np.array([], np.int64)]
    policy = Static(chosen, NUM_EXPERTS)
    assert [policy.initial(layer).tolist() for layer in (0, 1)] == [[2, 5], []]


def test_presets_make_what_they_name() -> None:
    assert isinstance(make_placement("tide", {}, [3]), Tide)
    assert isinstance(make_placement("lru", {}, [3]), LRU)
    everyone = list(range(NUM_EXPERTS))
    for name, first in (("static", [0, 1, 2]), ("resident", everyone), ("all-host", [])):
        assert make_placement(name, {}, [3]).initial(0).tolist() == first


def test_tau_reaches_the_policy() -> None:
    for options, refreshes in (({}, [0, 4, 8]), ({"tau": "3"}, [0, 3, 6, 9])):
        tide, refreshed = make_placement("tide", options, [1]), []
        for index in range(10):
            ranks = tide.begin_pass(Step(StepKind.DENOISE, index), np.ones(1, int), np.ones(1, int))
            refreshed += [index] * bool(ranks.most)
        assert refreshed == refreshes


def test_auto_is_resident_if_everything_fits_else_what_suits_the_decoding() -> None:
    assert choose_preset("auto", 0)[0] == choose_preset("auto", -1)[0] == "resident"
    assert choose_preset("auto", 1)[0] == "lowtide"
    for name in set(preset_names()) - {"auto"}:
        assert choose_preset(name, 0)[0] == name
    for name in set(preset_names()) - {"auto", "resident"}:
        assert choose_preset(name, 1)[0] == name
    assert choose_preset("auto", 1, has_device=True)[0] == "lowtide"
    with pytest.raises(UsageError, match=r'2.0 KiB \(2048 bytes\) too .*`host_memory`.*"tide"`'):
        choose_preset("resident", 2048)
    with pytest.raises(UsageError, match="raise `gpu_memory`"):
        choose_preset("resident", 1, has_device=True)


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
