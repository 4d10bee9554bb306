"""tau: drift and misses against a replay of `Tide`, the solvers against enumeration."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_facts import make_facts

from lowtide.core import Costs, Curve, Demand, IntArray, Step, StepKind
from lowtide.errors import UsageError
from lowtide.lab.simulation.simulator import simulate
from lowtide.policies.online_tau import OnlineTau, TauChange, interval_seconds
from lowtide.policies.placement import Tide
from lowtide.policies.recipe import PolicyInputs
from lowtide.policies.tau import drift, miss_shares, paper_cost_s, paper_tau
from lowtide.replay.trace import TraceShape, TraceWriter


def demand_of(hits: IntArray) -> Demand:
    experts = np.flatnonzero(hits)
    return Demand(experts, hits[experts], np.zeros(len(experts), np.bool_))


def replay_tide(hits: IntArray, budget: int, tau: int) -> tuple[int, list[int]]:
    """Misses and admissions per step, summed over layers, of the policy itself. [steps, L, E]."""
    num_layers, num_experts = hits.shape[1:]
    tide = Tide(num_layers, num_experts, tau)
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
    with pytest.raises(UsageError, match="budget"):
        drift([], 0)


def feed(online: OnlineTau, hits: IntArray, first: int = 0) -> None:
    for index, now in enumerate(hits, start=first):
        online.observe(Step(StepKind.DENOISE, index), now)


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


def make_costs(link_s: float, host_s: float) -> Costs:
    host, device = Curve([(1, host_s)]), Curve([(1, 0.01)])
    return Costs(1, link_s, host, device, Curve([(1, 0.0)]), 0.0)


@pytest.mark.parametrize(
    "link_s, host_s, best, num_steps", [(1.0, 0.1, {16, 24, 32}, 8), (0.1, 1.0, {1}, 4)]
)
def test_online_tau_avoids_what_is_dearer_and_tells_it(
    link_s: float, host_s: float, best: set[int], num_steps: int
) -> None:
    changes: list[TauChange] = []
    costs = make_costs(link_s, host_s)
    online = OnlineTau(32, 8, costs, waits=True, on_change=changes.append)
    feed(online, make_hits(65, num_changes=4))
    assert online.tau == changes[-1].new and online.tau in best
    # After 4 steps no interval from 4 upwards has refreshed again, so they are alike.
    assert changes[0].old == 4 and changes[0].num_steps == num_steps and 0 < changes[0].saved < 1


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("link_s, host_s", [(1.0, 0.1), (0.1, 1.0), (0.3, 0.3)])
@pytest.mark.parametrize("num_changes", [0, 1, 4])
def test_the_estimate_is_nearly_what_the_simulator_says(
    waits: bool, link_s: float, host_s: float, num_changes: int
) -> None:
    """Both agree which interval is fast: the estimated best is within 3% of the simulated one."""
    costs, hits = make_costs(link_s, host_s), make_hits(64, num_changes)
    writer = TraceWriter("m", TraceShape(1, 32, 8))
    for index, now in enumerate(hits):
        writer.append(Step(StepKind.DENOISE, index), 0, np.flatnonzero(now[0])[None, None], 1)
    trace = writer.trace()
    taus = [1, 2, 4, 8, 16]
    seconds = interval_seconds(trace.hits(), np.arange(64), taus, 8, costs, waits)
    setting = PolicyInputs([8], 32, costs).having(waits=waits)
    simulated = [simulate(trace, "tide", setting.having(tau=tau)).total_s for tau in taus]
    assert simulated[int(seconds.argmin())] <= 1.03 * min(simulated)


def test_a_watched_layer_that_is_never_heard_of_counts_for_nothing() -> None:
    """One whose experts are all resident asks no policy."""
    hits = make_hits(64, num_changes=8)
    costs = make_costs(1.0, 0.1)
    one, two = (OnlineTau(32, 8, costs, watched=(0, *more)) for more in ((), (3,)))
    silent = OnlineTau(32, 8, costs, watched=(0, 3))
    for index, now in enumerate(hits):
        first, last = np.zeros((4, 32), np.int64), np.zeros((4, 32), np.int64)
        first[0] = last[3] = now[0]
        for online, of_all in ((one, first), (two, first), (silent, last)):
            online.observe(Step(StepKind.DENOISE, index), of_all)
    assert one.tau == two.tau == silent.tau


def test_online_tau_stays_where_little_is_to_be_gained(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[TauChange] = []
    online = OnlineTau(32, 8, make_costs(0.1, 1.0), waits=True, on_change=changes.append)
    monkeypatch.setattr("lowtide.policies.online_tau.HYSTERESIS", 1.0)
    feed(online, make_hits(65, num_changes=4))
    assert online.tau == 4 and not changes


def test_prefill_and_other_layers_do_not_count() -> None:
    changes: list[TauChange] = []
    online = OnlineTau(32, 8, make_costs(0.1, 1.0), waits=True, on_change=changes.append)
    for now in make_hits(40, num_changes=4):
        of_all = np.zeros((8, 32), np.int64)
        of_all[0] = now[0]
        online.observe(Step(StepKind.PREFILL, 0), of_all)
        online.observe(Step(StepKind.DENOISE, 0), of_all[::-1])
    assert not changes and online.tau == 4


def test_more_fetches_than_staging_slots_come_after_the_residents() -> None:
    """One layer, 4 residents of 1 s each, fetches of 10 s; 2 of 4 admitted come beside them."""
    costs = Costs(1, 10.0, Curve([(1, 0.1)]), Curve([(1, 1.0)]), Curve([(1, 0.0)]), 0.0)
    hits = np.zeros((2, 1, 8), np.int64)
    hits[0, 0, :4], hits[1, 0, 4:] = 1, 1  # the second step asks for four others
    [waited_s, stayed_s] = interval_seconds(hits, np.array([0, 1]), (1, 2), 4, costs, waits=True)
    assert waited_s == 4 + (2 * 10 + 2 * 1) + 2 * 10
    assert stayed_s == 4 + 4 * 0.1
