"""tau: drift and misses against a replay of `Tide`, the solvers against enumeration."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_facts import make_facts

from lowtide.core import Demand, IntArray, Step, StepKind
from lowtide.errors import UsageError
from lowtide.policies.placement import Tide
from lowtide.policies.tau import (
    OnlineTau,
    TauChange,
    auto_tau,
    drift,
    expected_migrations,
    miss_shares,
    paper_cost_s,
    paper_tau,
)


def demand_of(hits: IntArray) -> Demand:
    experts = np.flatnonzero(hits)
    return Demand(experts, hits[experts], np.zeros(len(experts), np.bool_))


def replay_tide(hits: IntArray, budget: int, tau: int) -> tuple[int, list[int]]:
    """Misses and admissions per step, summed over layers, of the policy itself. [steps, L, E]"""
    num_layers, num_experts = hits.shape[1:]
    tide = Tide(num_experts, tau)
    is_resident = np.zeros((num_layers, num_experts), np.bool_)
    num_misses, admitted = 0, [0] * len(hits)
    for index, now in enumerate(hits):
        for layer in range(num_layers):
            here = is_resident[layer]
            facts = make_facts(
                demand_of(now[layer]),
                step=Step(StepKind.DENOISE, index),
                layer=layer,
                is_kept=here,
                capacity=[budget] * num_layers,
            )
            moves = tide.update(facts)
            here[moves.evict], here[moves.admit] = False, True
            admitted[index] += len(moves.admit)
            num_misses += int(((now[layer] > 0) & ~here).sum())
    return num_misses, admitted


traces = st.builds(
    lambda seed, steps: np.random.default_rng(seed).integers(0, 4, (steps, 2, 7)),
    st.integers(0, 200),
    st.integers(1, 9),
)


@given(hits=traces, budget=st.integers(1, 7))
def test_misses_and_drift_are_those_of_tide(hits: IntArray, budget: int) -> None:
    shares = miss_shares([hits, hits[:2]], budget, max_tau=5)
    num_steps = 2 * (len(hits) + len(hits[:2]))
    for tau in range(1, 6):
        misses = replay_tide(hits, budget, tau)[0] + replay_tide(hits[:2], budget, tau)[0]
        assert shares[tau - 1] == pytest.approx(misses / (budget * num_steps))
    admitted = replay_tide(hits, budget, 1)[1][1:]
    expected = sum(admitted) / (budget * 2 * len(admitted)) if admitted else 0.0
    assert drift([hits], budget) == pytest.approx(expected)


def test_drift_by_hand() -> None:
    hits = np.zeros((3, 1, 4), np.int64)
    hits[0, 0, [0, 1]] = 5
    hits[1, 0, [0, 2]] = 5  # one of two changes
    hits[2, 0, [0, 2]] = 5  # none does
    assert drift([hits], 2) == 0.25
    assert drift([hits[:1]], 2) == 0.0


def test_migrations_at_the_ends() -> None:
    assert expected_migrations(0.25, 8, 16, 1) == pytest.approx(0.25 * 8 * 16)
    assert expected_migrations(0.0, 8, 16, 4) == 0.0
    assert expected_migrations(1.0, 8, 16, 4) == pytest.approx(16 * 8 / 4)


@given(
    d=st.floats(0, 1),
    steps=st.integers(1, 12),
    grow=st.lists(st.floats(0, 0.5), min_size=12, max_size=12),
    link_s=st.floats(0, 10),
    host_s=st.floats(0, 10),
)
def test_paper_tau_is_the_least_of_the_formula(
    d: float, steps: int, grow: list[float], link_s: float, host_s: float
) -> None:
    misses, budget = np.cumsum(grow), 8
    tau = paper_tau(d, misses, steps, budget, link_s, host_s)
    assert 1 <= tau <= max(1, steps - 1)

    def formula(t: int) -> float:
        moves = budget * steps / t * (1 - (1 - d) ** t)
        return link_s * moves + host_s * steps * budget * float(misses[t - 1])

    costs = {t: formula(t) for t in range(1, max(1, steps - 1) + 1)}
    assert costs[tau] == min(costs.values())
    assert paper_cost_s(tau, d, misses, steps, budget, link_s, host_s) == pytest.approx(costs[tau])


def test_paper_tau_at_its_extremes() -> None:
    misses = np.array([0.0, 0.1, 0.2, 0.3])
    assert paper_tau(0.5, misses, 5, 4, link_s=0.0, host_s=1.0) == 1  # moving costs nothing
    assert paper_tau(0.5, misses, 5, 4, link_s=1.0, host_s=0.0) == 4  # missing costs nothing
    with pytest.raises(UsageError):
        paper_tau(0.5, misses[:0], 5, 4, 1.0, 1.0)
    with pytest.raises(UsageError, match="budget"):
        drift([], 0)


def test_auto_tau_is_the_least_simulated() -> None:
    times = {1: 5.0, 2: 3.0, 4: 3.0, 8: 4.0}
    assert auto_tau(times.__getitem__, times) == 2
    with pytest.raises(UsageError):
        auto_tau(times.__getitem__, [])


def feed(online: OnlineTau, hits: IntArray, first: int = 0) -> None:
    for index, now in enumerate(hits, start=first):
        online.observe(Step(StepKind.DENOISE, index), 0, demand_of(now[0]))


def make_hits(num_steps: int, num_changes: int, seed: int = 0) -> IntArray:
    """One layer of 32 experts, 8 activated, `num_changes` of them new at each step."""
    draw = np.random.default_rng(seed)
    hits = np.zeros((num_steps, 1, 32), np.int64)
    active = list(range(8))
    for now in hits:
        others = [e for e in range(32) if e not in active]
        active = active[num_changes:] + draw.permutation(others)[:num_changes].tolist()
        now[0, active] = 4
    return hits


def test_online_estimates_agree_with_the_offline_ones() -> None:
    hits = make_hits(200, num_changes=2)
    online = OnlineTau(32, 8, 1.0, 1.0, max_tau=4, decay=0.999)
    feed(online, hits)
    assert online.drift == pytest.approx(drift([hits], 8), rel=0.02)
    assert online.misses() == pytest.approx(miss_shares([hits], 8, 4), abs=0.02)


@pytest.mark.parametrize("link_s, host_s, best", [(1.0, 0.1, 8), (0.1, 1.0, 1)])
def test_online_tau_follows_the_drift_and_tells_it(link_s: float, host_s: float, best: int) -> None:
    changes: list[TauChange] = []
    online = OnlineTau(
        32, 8, link_s, host_s, tau=4, max_tau=8, window=16, decay=0.8, on_change=changes.append
    )
    feed(online, make_hits(64, num_changes=8))  # nothing lasts: what is dearer is avoided
    assert online.tau == best == changes[-1].new
    assert changes[0].old == 4 and changes[0].num_steps % 16 == 0
    assert 0.9 < changes[0].drift <= 1.0


def test_a_watched_layer_that_is_never_heard_of_counts_for_nothing() -> None:
    """One whose experts are all resident asks no policy."""
    hits = make_hits(64, num_changes=8)
    one, two = (OnlineTau(32, 8, 1.0, 0.1, window=16, watched=(0, *more)) for more in ((), (3,)))
    silent = OnlineTau(32, 8, 1.0, 0.1, window=16, watched=(0, 3))
    for index, now in enumerate(hits):
        for online, layer in ((one, 0), (two, 0), (silent, 3)):
            online.observe(Step(StepKind.DENOISE, index), layer, demand_of(now[0]))
    assert one.tau == two.tau == silent.tau != 4
    assert one.drift == two.drift == silent.drift


def test_online_tau_stays_where_little_is_to_be_gained() -> None:
    changes: list[TauChange] = []
    online = OnlineTau(32, 8, 1.0, 1.0, tau=4, window=8, hysteresis=1.0, on_change=changes.append)
    feed(online, make_hits(64, num_changes=4))
    assert online.tau == 4 and not changes


def test_ages_end_with_a_block_and_prefill_does_not_count() -> None:
    online = OnlineTau(32, 8, 1.0, 1.0, max_tau=4)
    hits = make_hits(2, num_changes=8)
    for now in (hits[0], hits[1]):
        online.observe(Step(StepKind.DENOISE, 0), 0, demand_of(now[0]))
    online.observe(Step(StepKind.PREFILL, 1), 0, demand_of(hits[0, 0]))
    online.observe(Step(StepKind.DENOISE, 1), 7, demand_of(hits[0, 0]))
    assert online.drift == 0.0 and online.misses()[0] == 0.0


def test_bad_options_are_refused() -> None:
    with pytest.raises(UsageError, match="tau 9"):
        OnlineTau(32, 8, 1.0, 1.0, tau=9, max_tau=8)
