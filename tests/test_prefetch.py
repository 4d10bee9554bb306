"""Prefetch: rankings by hand, and the guard that lets only a paying one act."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_facts import make_facts

from lowtide.core import Demand, Facts
from lowtide.errors import UsageError
from lowtide.lab.baselines import Statistics
from lowtide.policies.prefetch import (
    Ahead,
    Combined,
    Gate,
    NextGate,
    NoPrefetch,
    PaysOff,
    PrefetchOutcome,
    PreviousStep,
    Residual,
    count_following,
)

NO_EXPERTS = np.zeros(6, np.bool_)


def told(layer: int, **hits: int) -> Facts:
    """told(1, e2=5): in layer 1 expert 2 has five tokens."""
    experts = np.array(sorted(int(name[1:]) for name in hits), np.int64)
    num_tokens = np.array([hits[f"e{e}"] for e in experts.tolist()], np.int64)
    demand = Demand(experts, num_tokens, np.zeros(len(experts), np.bool_))
    return make_facts(demand, layer=layer)


@pytest.mark.parametrize("kind", [NextGate, Residual])
def test_gates_rank_absent_experts_by_predicted_tokens(kind: type[NextGate]) -> None:
    predicted = np.array([0, 5, 9, 5, 1, 0])
    is_resident = NO_EXPERTS.copy()
    is_resident[2] = True
    assert kind(3).choose(Ahead(1, is_resident, predicted)).tolist() == [1, 3, 4]
    assert kind(1).choose(Ahead(1, is_resident, predicted)).tolist() == [1]
    with pytest.raises(UsageError, match="early gate"):
        kind(3).choose(Ahead(1, is_resident))


def test_which_gate_is_wanted() -> None:
    assert NextGate(1).gate is Gate.RAW and Residual(1).gate is Gate.RESIDUAL
    assert NoPrefetch().gate is Gate.NONE and PaysOff(Residual(1)).gate is Gate.RESIDUAL


def test_the_previous_step_is_remembered_per_layer() -> None:
    last = PreviousStep(2, num_layers=2, num_experts=6)
    assert last.choose(Ahead(0, NO_EXPERTS)).tolist() == []
    last.observe(told(0, e4=1, e2=7, e5=1))
    assert last.choose(Ahead(0, NO_EXPERTS)).tolist() == [2, 4]
    assert last.choose(Ahead(1, NO_EXPERTS)).tolist() == []
    last.observe(told(0, e1=1))
    assert last.choose(Ahead(0, NO_EXPERTS)).tolist() == [1]


def test_statistics_follow_what_calibration_saw() -> None:
    ids = np.array([[[0], [3]], [[0], [3]], [[0], [4]], [[1], [5]]])  # [rows, layers, k]
    following = count_following([ids[:2], ids[2:]], 6)
    assert following.shape == (1, 6, 6) and following[0, 0].tolist() == [0, 0, 0, 2, 1, 0]
    usual = Statistics(3, following)
    assert usual.choose(Ahead(1, NO_EXPERTS)).tolist() == []
    usual.observe(told(0, e0=3))
    assert usual.choose(Ahead(1, NO_EXPERTS)).tolist() == [3, 4]
    usual.observe(told(0, e0=1, e1=2))
    assert usual.choose(Ahead(1, NO_EXPERTS)).tolist() == [5, 3, 4]
    assert usual.choose(Ahead(0, NO_EXPERTS)).tolist() == []


def test_a_combination_weighs_its_parts_alike() -> None:
    both = Combined(2, NextGate(2), PreviousStep(2, 2, 6))
    assert both.gate is Gate.RAW
    both.observe(told(1, e0=4, e3=4))
    assert both.choose(Ahead(1, NO_EXPERTS, np.array([1, 0, 2, 0, 0, 0]))).tolist() == [0, 2]
    assert both.choose(Ahead(1, NO_EXPERTS, np.array([0, 9, 1, 0, 0, 0]))).tolist() == [1, 0]


@given(
    seed=st.integers(0, 20),
    ahead=st.integers(0, 8),
    residents=st.sets(st.integers(0, 5)),
)
def test_only_absent_experts_once_and_not_too_many(
    seed: int, ahead: int, residents: set[int]
) -> None:
    draw = np.random.default_rng(seed)
    predicted = draw.integers(0, 4, 6)
    last = PreviousStep(ahead, 2, 6)
    last.observe(told(1, e1=2, e3=1))
    everyone = [
        NextGate(ahead),
        last,
        Combined(ahead, NextGate(ahead), last),
        NoPrefetch(),
    ]
    is_resident = np.isin(np.arange(6), list(residents))
    for prefetch in everyone:
        chosen = prefetch.choose(Ahead(1, is_resident, predicted)).tolist()
        assert len(chosen) == len(set(chosen)) <= ahead and not set(chosen) & residents


def test_a_prefetch_that_does_not_pay_is_switched_off_and_comes_back() -> None:
    guard = PaysOff(NextGate(2))
    predicted = np.array([3, 2, 0, 0, 0, 0])
    assert guard.choose(Ahead(1, NO_EXPERTS, predicted)).tolist() == [0, 1]
    guard.record(PrefetchOutcome(num_hits=1, num_late=5, num_wasted=1))
    assert guard.is_on  # as much earned as lost, and late ones count neither way
    guard.record(PrefetchOutcome(num_wasted=2))
    assert not guard.is_on
    for _ in range(8):  # of which one is watched
        assert guard.choose(Ahead(1, NO_EXPERTS, predicted)).tolist() == []
        guard.observe(told(1, e0=1, e5=1))  # one of two silent forecasts was right
    assert not guard.is_on
    for _ in range(4 * 8):
        guard.choose(Ahead(1, NO_EXPERTS, predicted))
        guard.observe(told(1, e0=1, e1=1))
    assert guard.is_on
    assert guard.choose(Ahead(1, NO_EXPERTS, predicted)).tolist() == [0, 1]


def test_in_silence_few_forecasts_are_made_and_every_layer_has_its_turn() -> None:
    guard = PaysOff(NextGate(2))
    assert all(guard.wants_prediction(layer) for layer in range(1, 5))
    guard.record(PrefetchOutcome(num_wasted=1))
    wanted = []
    for _ in range(16):
        for layer in range(1, 5):
            is_wanted = guard.wants_prediction(layer)
            wanted += [layer] * is_wanted
            predicted = np.array([3, 2, 0, 0, 0, 0]) if is_wanted else None
            assert guard.choose(Ahead(layer, NO_EXPERTS, predicted)).tolist() == []
    assert sorted(wanted) == sorted(2 * [1, 2, 3, 4])


def test_a_prediction_passed_over_is_no_error_once_it_is_switched_on() -> None:
    guard = PaysOff(NextGate(2))
    assert guard.choose(Ahead(1, NO_EXPERTS, None)).tolist() == []


def test_switching_needs_more_than_breaking_even() -> None:
    guard = PaysOff(NextGate(2))
    guard.record(PrefetchOutcome(num_wasted=1))
    predicted = np.array([3, 2, 0, 0, 0, 0])
    for _ in range(400):  # half of the forecasts right: even, below the margin
        guard.choose(Ahead(1, NO_EXPERTS, predicted))
        guard.observe(told(1, e0=1))
    assert not guard.is_on
