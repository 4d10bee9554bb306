"""The simulator: timelines worked out by hand, and what must hold for every preset."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from common.synth_trace import locality_for, synth_decode_trace, synth_trace
from hypothesis import given
from hypothesis import strategies as st
from policy_facts import COSTS

from lowtide.core import NO_EXPERTS, Costs, Facts, MoEShape, Moves, Step, StepKind
from lowtide.errors import UsageError
from lowtide.lab.calibration_report import step_similarity
from lowtide.lab.profiles import DataSheet, PaperMachine, load_profile, parse_profile, profile_names
from lowtide.lab.simulation.host_alone import compare_alone
from lowtide.lab.simulation.simulator import Report, calibrate, compare, fastest_tau, simulate
from lowtide.policies.assignment import AllFetch, AllHost, Greedy
from lowtide.policies.catalogue import CATALOGUE, WAITS
from lowtide.policies.placement import Static, Tide
from lowtide.policies.prefetch import Gate, NoPrefetch, PreviousStep
from lowtide.policies.presets import recipe
from lowtide.policies.recipe import PolicyInputs, Recipe
from lowtide.policies.tau import TAUS, FollowDrift
from lowtide.replay.trace import Trace, TraceShape, TraceWriter

FIXED = replace(COSTS, num_staging=1)
SHAPE = TraceShape(3, 16, 2)
FULL = TraceShape(2, 64, 4)


def make_trace(passes: list[list[list[int]]], num_experts: int = 8) -> Trace:
    """One row per pass; `passes[p][layer]` are its experts."""
    shape = TraceShape(len(passes[0]), num_experts, len(passes[0][0]))
    writer = TraceWriter("m", shape)
    for index, ids in enumerate(passes):
        writer.append(Step(StepKind.DENOISE, index), 0, np.array([ids]), num_committed=1)
    return writer.trace()


def make_setting(trace: Trace, capacity: int, costs: Costs = FIXED) -> PolicyInputs:
    layers, experts, _ = trace.shape[:3]
    return PolicyInputs([capacity] * layers, experts, costs)


def test_one_layer_by_hand() -> None:
    trace = make_trace([[[0, 1, 2, 3]]])
    setting = make_setting(trace, 2)
    # Dense 1, sync 0.5, residents 0 and 1 take 6 s on the device; the host takes 8 s.
    report = simulate(trace, "fiddler", setting)
    assert report.total_s == 9.5 and report.binds == "host" and report.hit_rate == 0.5
    # Fetched: the first arrives at 11.5 and runs until 14.5, which frees the one staging slot;
    # the second arrives at 24.5 and runs until 27.5.
    fetch = Recipe(lambda s: Static.first(s.capacity, s.num_experts), lambda s: AllFetch())
    report = simulate(trace, fetch, setting)
    assert report.total_s == 27.5 and report.num_fetched == 2 and report.moved_bytes == 200
    assert report.binds == "link" and report.bound_s["link"] == pytest.approx(4 + 10)
    # All resident: no synchronisation.
    assert simulate(trace, "resident", setting).total_s == 13.0
    assert simulate(trace, "all-host", setting).total_s == 1.5 + 16


def test_hit_rates_are_of_each_pass_and_of_groups_of_passes() -> None:
    """Two layers keep experts 0 and 1; of each pass' experts so many are among them."""
    passes = [[[0, 1], [0, 5]], [[0, 4], [5, 6]], [[4, 5], [0, 1]]]
    trace = make_trace([[sorted(ids) for ids in each] for each in passes])
    for report in (
        simulate(trace, "fiddler", make_setting(trace, 2)),
        *compare_alone(trace, ["fiddler"], make_setting(trace, 2)),
    ):
        assert report.hit_rates().tolist()[0] == [1.0, 0.5]
        assert report.as_dict()["hit_rates"] == [0.75, 0.25, 0.5]
        assert report.hit_rates(2).tolist() == [[0.75, 0.25], [0.0, 1.0]]
    assert Report("none").as_dict()["hit_rates"] == []


def test_two_staging_slots_keep_the_link_busy() -> None:
    trace = make_trace([[[0, 1, 2, 3]]])
    costs = replace(COSTS, num_staging=2)
    report = simulate(trace, "on-demand", make_setting(trace, 0, costs))
    assert report.total_s == 1.5 + 4 * 10 + 3


def test_demand_has_the_slots_that_no_prefetch_is_in() -> None:
    trace = make_trace([[[0, 1, 2, 3]]])
    costs = replace(FIXED, num_ahead=1)
    assert simulate(trace, "on-demand", make_setting(trace, 0, costs)).total_s == 1.5 + 4 * 10 + 3


def test_moves_ride_in_idle_link_time() -> None:
    # Tide admits 0 and 1 at its refresh; the moves begin when the first layer's work does, at 1.5,
    # and end at 11.5 and 21.5. A pass takes 9.5 s while nothing is there.
    trace = make_trace([[[0, 1]]] * 4)
    report = simulate(trace, Recipe(_tide_once, lambda s: AllHost()), make_setting(trace, 2))
    # Passes: 0-9.5, 9.5-19 (its router is read at 10.5), 19-: expert 0 is there at 20, so
    # 20.5 + max(3, 4); then both are there at 25.5, which takes no synchronisation.
    assert report.num_moved == 2 and report.num_hits == 3
    assert report.total_s == pytest.approx(9.5 + 9.5 + 5.5 + 7)


def _tide_once(setting: PolicyInputs) -> Tide:
    return Tide(setting.num_layers, setting.num_experts, 100)


def test_waiting_for_moves_is_an_option() -> None:
    trace = make_trace([[[0, 1]]] * 2)
    waiting = Recipe(_tide_once, lambda s: AllHost(), waits=WAITS.of)
    report = simulate(trace, waiting, make_setting(trace, 2).having(waits=True))
    assert report.num_fetched == 2 and report.num_moved == 0
    assert report.total_s == (1.5 + 10 + 3 + 10 + 3) + (1 + 6)


def test_a_prefetch_arrives_while_the_layer_before_computes() -> None:
    # Layer 1's expert of the last pass is fetched while layer 0's host computes.
    trace = make_trace([[[0], [1]]] * 2)
    made = Recipe(
        lambda s: Static.first([0, 0], s.num_experts),
        lambda s: Greedy(),
        lambda s: PreviousStep(1, s.num_layers, s.num_experts),
    )
    costs = replace(COSTS, link_s=6.0)
    report = simulate(trace, made, make_setting(trace, 0, costs))
    # First pass: 5.5 per layer. Second: layer 0 until 16.5; the prefetch began at 12.5 and ends
    # at 18.5, just after layer 1 has routed (18): late by 0.5, then 3 s: 18 + max(3.5).
    assert report.num_prefetched == 1 and report.prefetch.num_late == 1
    assert report.total_s == pytest.approx(21.5)


class _BringsOthers(Static):
    """Has experts 6 and 7 come during the first pass, which asks for neither."""

    def update(self, facts: Facts) -> Moves:
        admit = np.array([6, 7] if facts.step.index == 0 else [], np.int64)
        return Moves(admit, NO_EXPERTS)


def test_the_link_serves_demand_before_moves() -> None:
    # Pass 0 fetches expert 0 from 1.5 to 11.5 and ends at 14.5; the link then brings 6, until
    # 21.5. Pass 1 routes at 16: its fetch waits for 6, goes before 7, and is there at 31.5.
    trace = make_trace([[[0]], [[1]]])
    made = Recipe(lambda s: _BringsOthers([NO_EXPERTS], s.num_experts), lambda s: AllFetch())
    report = simulate(trace, made, make_setting(trace, 2))
    assert report.num_fetched == 2 and report.num_moved == 1
    assert report.total_s == 31.5 + 3


presets = sorted(CATALOGUE)


@given(
    seed=st.integers(0, 5),
    capacity=st.integers(0, 16),
    locality=st.sampled_from([0.0, 0.9, 1.0]),
)
def test_every_preset_at_every_budget(seed: int, capacity: int, locality: float) -> None:
    trace = synth_trace(
        SHAPE,
        num_blocks=2,
        steps_per_block=3,
        block_length=6,
        num_prompt_rows=5,
        locality=locality,
        seed=seed,
    )
    known = calibrate(trace)
    setting = PolicyInputs([capacity] * 3, 16, FIXED, known.frequency, known.following).having(
        tau=FollowDrift(), miss="wait"
    )
    reports = compare(trace, presets, setting)
    activated = int((trace.hits() > 0).sum())
    for report in reports:
        assert report.num_activated == activated and report.num_tokens == 12
        assert 0 <= report.num_hits <= activated
        busiest = max(report.device_s, report.host_s, report.link_s - FIXED.link_s)
        assert busiest <= report.total_s + 1e-6
        assert sum(report.bound_s.values()) == pytest.approx(report.total_s)
        transfers = report.num_fetched + report.num_moved + report.num_prefetched
        assert report.link_s == pytest.approx(transfers * FIXED.link_s)
        late = report.prefetch
        assert late.num_hits + late.num_late + late.num_wasted <= report.num_prefetched
        assert report.as_dict()["binds"] in ("device", "host", "link")


def test_replays_are_repeatable() -> None:
    trace = synth_trace(SHAPE, num_blocks=2, steps_per_block=3)
    setting = make_setting(trace, 5).having(miss="wait")
    for preset in presets:
        first, again = simulate(trace, preset, setting), simulate(trace, preset, setting)
        assert first.as_dict() == again.as_dict()


def test_locality_is_what_tide_lives_on() -> None:
    costs = load_profile("a100-40gb").costs(MoEShape(2, 64, 4, 2048, 512))

    def run(locality: float) -> Report:
        trace = synth_trace(
            FULL, num_blocks=3, steps_per_block=12, block_length=8, locality=locality, skew=0.0
        )
        return simulate(trace, "tide", PolicyInputs([24, 24], 64, costs))

    restless, frozen = run(0.0), run(1.0)
    assert frozen.hit_rate > restless.hit_rate + 0.2
    assert frozen.tokens_per_s > 1.2 * restless.tokens_per_s
    assert frozen.num_moved < restless.num_moved


@pytest.mark.parametrize("capacity", [16, 32, 48])
def test_lowtide_is_not_behind_the_others(capacity: int) -> None:
    shape = MoEShape(2, 64, 4, 2048, 512)
    trace = synth_trace(FULL, num_blocks=4, steps_per_block=10, locality=0.97)
    costs = load_profile("a100-40gb").costs(shape)
    setting = PolicyInputs([capacity] * 2, 64, costs, options={"miss": "wait"})
    others = sorted(CATALOGUE.keys() - {"resident", "lowtide"})
    ours, *rest = compare(trace, ["lowtide", *others], setting)
    rest.append(simulate(trace, "hybrimoe", setting.having(by_greedy=True)))
    rest.append(simulate(trace, "tide", setting.having(tau=1)))
    assert ours.tokens_per_s >= max(report.tokens_per_s for report in rest)


def test_a_prefetched_expert_that_the_host_computes_is_wasted() -> None:
    # Layer 1's expert takes 100 s to come and 4 s on the host.
    trace = make_trace([[[0], [1]]] * 3)
    made = Recipe(
        lambda s: Static.first([0, 0], s.num_experts),
        lambda s: Greedy(),
        lambda s: PreviousStep(1, s.num_layers, s.num_experts),
    )
    costs = replace(COSTS, link_s=100.0)
    outcome = simulate(trace, made, make_setting(trace, 0, costs)).prefetch
    assert (outcome.num_hits, outcome.num_late, outcome.num_wasted) == (0, 0, 1)


def test_the_fastest_tau_by_simulation() -> None:
    shape = MoEShape(2, 64, 4, 2048, 512)
    costs = load_profile("rtx3090").costs(shape)
    trace = synth_trace(FULL, num_blocks=3, steps_per_block=8, locality=0.9)

    settings = {tau: PolicyInputs([24, 24], 64, costs, options={"tau": tau}) for tau in TAUS}
    times = {tau: simulate(trace, "tide", each).total_s for tau, each in settings.items()}
    follows = PolicyInputs([24, 24], 64, costs, options={"tau": FollowDrift(5)})
    tried = [tau for tau in TAUS if tau <= 8]  # the last one once a block
    assert fastest_tau(trace, "tide", follows) == min(tried, key=lambda tau: times[tau])


def test_an_early_gate_is_as_good_as_it_is_said_to_be() -> None:
    trace = synth_trace(SHAPE, num_blocks=3, steps_per_block=6)
    costs = replace(COSTS, link_s=0.1, sync_s=0.0)
    setting = make_setting(trace, 2, costs)

    def wasted(accuracy: float) -> float:
        report = simulate(trace, "hybrimoe", setting, gate_accuracy={Gate.RAW: accuracy})
        return report.prefetch.num_wasted / max(1, report.num_prefetched)

    assert wasted(1.0) == 0.0 < wasted(0.0)


def test_a_report_says_where_an_early_gates_predictions_are_from() -> None:
    trace = synth_trace(SHAPE, num_blocks=1, steps_per_block=3)
    setting = make_setting(trace, 4)
    raw = {Gate.RAW: 0.7}
    assert simulate(trace, "tide", setting).foresight == "none"
    assert simulate(trace, "hybrimoe", setting).foresight == "assumed"
    assert simulate(trace, "hybrimoe", setting, gate_accuracy=raw).foresight == "measured"
    told = simulate(trace, "hybrimoe", setting, predictions={Gate.RAW: list(trace.hits())})
    assert told.foresight == "recorded"
    with pytest.raises(UsageError, match="residual.*missing.*raw"):
        simulate(trace, "dali", setting, gate_accuracy=raw)


def test_mismatches_are_refused() -> None:
    trace = synth_trace(SHAPE, num_blocks=1, steps_per_block=1)
    with pytest.raises(UsageError, match="3 MoE layers of 16"):
        simulate(trace, "tide", PolicyInputs([1] * 3, 17, FIXED))
    with pytest.raises(UsageError, match="from 0 to 16"):
        simulate(trace, "tide", PolicyInputs([17] * 3, 16, FIXED))
    with pytest.raises(UsageError, match="not known; choose one of"):
        recipe("nothing")
    with pytest.raises(UsageError, match="locality"):
        synth_trace(SHAPE, locality=1.5)


@pytest.mark.parametrize("num_rows, similarity", [(8, 0.97), (32, 0.985), (32, 0.9)])
def test_synthetic_steps_are_as_alike_as_asked(num_rows: int, similarity: float) -> None:
    locality = locality_for(similarity, FULL, num_rows, skew=0.5)
    trace = synth_trace(FULL, num_blocks=8, locality=locality, block_length=num_rows, skew=0.5)
    assert step_similarity(trace.blocks()).mean() == pytest.approx(similarity, abs=0.01)
    with pytest.raises(UsageError, match="alike"):
        locality_for(0.1, FULL, num_rows)


def test_synthetic_sequences_have_favourites_of_their_own() -> None:
    shape, preference = FULL._replace(num_layers=12), 0.53
    first, again, other = (
        synth_decode_trace(shape, num_new=96, skew=preference, taste=preference, text=text)
        for text in (0, 0, 1)
    )
    assert np.array_equal(first.ids, again.ids)
    rounds = synth_decode_trace(shape, num_rounds=2, num_new=96, skew=preference, taste=preference)
    assert np.array_equal(rounds.beginning(len(first.passes)).ids, first.ids)
    assert rounds.num_committed == 2 * first.num_committed
    assert first.num_committed == 96 and first.passes[0].step.kind is StepKind.PREFILL
    for distance in (1, 16):
        similar = step_similarity(first.blocks(), distance).mean()
        assert similar == pytest.approx(0.25, abs=0.05)
    usage = [trace.hits()[1:].sum(axis=0) for trace in (first, other)]
    alike = np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(*usage, strict=True)])
    assert 0.2 < alike < 0.8


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles(name: str) -> None:
    profile = load_profile(name)
    costs = profile.costs(MoEShape(19, 256, 8, 2048, 512), 2.0)
    assert costs.expert_bytes == 6 << 20
    assert profile.host_memory_bytes >= profile.device_memory_bytes
    one, many = np.array([1]), np.array([4096])
    assert costs.device_s(many) < costs.host_s(many)
    if isinstance(profile, DataSheet):  # a paper's code may launch longer than a host computes
        assert costs.device_s(one) < costs.host_s(one)
    assert costs.link_s > costs.device_s.at(1)


def test_the_profiles_of_the_papers_are_there() -> None:
    assert {"rtx3090", "a100-40gb", "h100", "h200", "laptop-8gb"} <= set(profile_names())
    of_papers = {"dali-3090", "tide-a100", "tide-h100"}
    assert {n for n in profile_names() if isinstance(load_profile(n), PaperMachine)} == of_papers


CURVES = """
name = "y"
source = "Figure 1"
weight_bytes = 0.5
device_memory_GB = 1
host_memory_GB = 1
layer = { dense_ms = [[1, 0.1]], sync_ms = 0.01 }
[[expert]]
num_weights = 600
link_ms = 1.0
host_ms = [[1, 2], [2, 4]]
device_ms = [[1, 0.5]]
[[expert]]
num_weights = 1200
link_ms = 1.5
host_ms = [[1, 6], [4, 9]]
device_ms = [[1, 0.5]]
"""


def test_curves_of_a_papers_machine_lie_between_those_that_are_known() -> None:
    profile = parse_profile(CURVES, "y.toml")
    of = {n: profile.costs(MoEShape(1, 8, 2, n // 3, 1)) for n in (300, 600, 900, 1200, 2400)}
    link_ms = {n: 1e3 * costs.link_s for n, costs in of.items()}
    assert link_ms == pytest.approx({300: 0.5, 600: 1.0, 900: 1.25, 1200: 1.5, 2400: 3.0})
    host_ms = [1e3 * of[900].host_s.at(n) for n in (1, 2, 4, 8)]
    assert host_ms == pytest.approx([4.0, (4 + 7) / 2, (8 + 9) / 2, (16 + 13) / 2])
    assert of[600].expert_bytes == 300


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ('source = "Figure 1"', "", "missing source"),
        ('source = "Figure 1"', 'source = ""', "source must be"),
        ("host_ms = [[1, 2], [2, 4]]", "", "missing host_ms"),
        ("[[1, 2], [2, 4]]", "[[1, -2], [2, 4]]", "expert.host_ms must be from"),
        ("[[1, 2], [2, 4]]", "[[1, 2], [2, 1]]", "do not fall"),
        ("[[1, 2], [2, 4]]", "[[2, 2], [1, 4]]", "ascending tokens"),
        ("[[1, 2], [2, 4]]", "[[0, 2]]", "must be from|ascending"),
        ("[[1, 2], [2, 4]]", "[]", "pairs"),
        ("[[1, 2], [2, 4]]", "3", "pairs"),
        ("link_ms = 1.0", "link_ms = -1.0", "expert.link_ms must be from"),
        ("link_ms = 1.0", "link_ms = nan", "expert.link_ms must be from"),
        ("num_weights = 600", "num_weights = 1300", "ascend by num_weights"),
        ("num_weights = 600", "num_weights = 0.5", "whole number"),
        ("num_weights = 1200", "num_weights = 1" + 400 * "0", "whole number"),
        ("weight_bytes = 0.5", 'efficiency = "x"', "not mixed"),
        ("sync_ms = 0.01", "sync_ms = true", "sync_ms"),
    ],
)
def test_bad_curves_are_refused_by_name(old: str, new: str, match: str) -> None:
    assert parse_profile(CURVES, "y.toml").name == "y"
    with pytest.raises(UsageError, match=f"y.toml.*({match})"):
        parse_profile(CURVES.replace(old, new, 1), "y.toml")


GOOD = """
name = "x"
device = { memory_GB = 1, bandwidth_GBps = 1, compute_TFLOPs = 1 }
host = { memory_GB = 1, bandwidth_GBps = 1, compute_TFLOPs = 1 }
link = { bandwidth_GBps = 1, latency_us = 1 }
sync = { latency_us = 1 }
efficiency = { device = 1, link = 1, host = 1 }
"""


@pytest.mark.parametrize(
    "old, new",
    [
        ("name = ", "title = "),
        ("sync = { latency_us = 1 }", ""),
        ("sync = { latency_us = 1 }", "sync = 3"),
        ("latency_us = 1 }", "latency_us = 1, more = 2 }"),
        ("memory_GB = 1,", "memory_GB = 0,"),
        ("memory_GB = 1,", "memory_GB = nan,"),
        ("bandwidth_GBps = 1,", "bandwidth_GBps = 1e-300,"),
        ("memory_GB = 1,", "memory_GB = true,"),
        ("efficiency = { device = 1,", "efficiency = { device = 1.5,"),
        ("=", "=="),
        ("memory_GB = 1,", "memory_GB = 0x" + 5000 * "f" + ","),
        ("memory_GB = 1,", "memory_GB = 1" + 5000 * "0" + ","),
        ("memory_GB = 1,", "memory_GB = " + 9000 * "["),
    ],
    ids=lambda text: text[:30],
)
def test_bad_profiles_are_refused(old: str, new: str) -> None:
    assert parse_profile(GOOD, "x.toml").name == "x"
    with pytest.raises(UsageError, match="x.toml"):
        parse_profile(GOOD.replace(old, new), "x.toml")


def test_profiles_from_files(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    with pytest.raises(UsageError, match="cannot be read"):
        load_profile(str(path))
    path.write_text(GOOD, encoding="utf-8")
    assert load_profile(str(path)).sync_s == 1e-6
    path.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="UTF-8"):
        load_profile(str(path))
    path.write_bytes(b"#" * (1 << 17))
    with pytest.raises(UsageError, match="more than"):
        load_profile(str(path))
    with pytest.raises(UsageError, match="a100-40gb"):
        load_profile("b200")


def test_dalis_swaps_are_all_done_between_two_steps() -> None:
    # The window ends with the first pass: expert 1 comes for 10 s before the second one begins.
    trace = make_trace([[[1]], [[1]]])
    made = replace(recipe("dali"), assignment=lambda s: AllHost(), prefetch=lambda s: NoPrefetch())
    setting = make_setting(trace, 1).having(w_size=1, u_size=1, swap=False)
    assert made.policies(setting).placement.initial(0).tolist() != [1]
    report = simulate(trace, made, setting)
    assert (report.num_moves_asked, report.num_moves_done, report.num_moved) == (1, 1, 1)
    assert report.total_s == (1.5 + 4) + 10 + (1.0 + 3) and report.bound_s["link"] == 10
    assert report.num_hits == 1


@given(seed=st.integers(0, 50), capacity=st.integers(0, 16), w_size=st.integers(1, 4))
def test_what_dali_asks_is_done(seed: int, capacity: int, w_size: int) -> None:
    trace = synth_trace(SHAPE, num_blocks=2, steps_per_block=6, block_length=6, seed=seed)
    setting = make_setting(trace, capacity).having(w_size=w_size)
    report = simulate(trace, "dali", setting, pass_s=0.5)
    assert report.num_moves_asked == report.num_moves_done
    lowtide = simulate(trace, "lowtide", setting)
    assert lowtide.num_moves_done <= lowtide.num_moves_asked
