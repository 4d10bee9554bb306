"""Figures of the simulated benchmark scripts beside the simulator; no result is judged here."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import dali
import exchange
import fit_profiles
import hindsight
import locality
import numpy as np
import pytest
import tau
from common import published_routing, simulated, traces
from common.synth_trace import synth_decode_trace, synth_trace
from policy_facts import COSTS

from lowtide.core import Step, StepKind
from lowtide.lab.profiles import load_profile
from lowtide.lab.simulation.simulator import simulate
from lowtide.policies.catalogue import CATALOGUE
from lowtide.policies.presets import recipe
from lowtide.replay.trace import Trace, TraceShape, TraceWriter

SHAPE = TraceShape(2, 16, 2)


def test_every_preset_that_shares_is_a_row() -> None:
    rows = {variant.preset for variant in simulated.VARIANTS.values()}
    # What buddymoe places is another's placement; some are variants that decide far longer.
    unlisted = {"resident", "buddymoe", "tide-released", "dali-exact", "dali-beam"}
    assert rows == CATALOGUE.keys() - unlisted
    known, trace = (synth_trace(SHAPE, num_blocks=1, steps_per_block=3, seed=s) for s in (0, 1))
    setting = simulated.make_setting(trace, COSTS, 4, known)
    reports = simulated.replay(trace, trace.hits(), setting, simulated.VARIANTS)
    assert all(report.num_tokens == trace.num_committed for report in reports.values())
    waits, follows = reports["tide waits"], reports["tide"]
    assert waits.num_moved == 0 < waits.num_fetched and follows.num_fetched == 0
    row = simulated.summary(follows)
    shares = [value for name, value in row.items() if name.endswith("_bound_share")]
    assert sum(shares) == pytest.approx(1.0)


def test_the_shipped_machine_of_dali_reproduces_its_anchors() -> None:
    cases = fit_profiles.dali_cases()
    anchors = fit_profiles.dali_anchors(cases, fit_profiles.Shipped("dali-3090"))
    assert len(anchors) == 6
    assert all(ratio == pytest.approx(1.0, abs=0.05) for ratio in anchors.values())


@pytest.mark.parametrize("name", fit_profiles.TIDE_BASELINES)
def test_the_shipped_machines_of_tide_are_the_fitted_ones(name: str) -> None:
    """The curves of one rate, by which their anchor is met, or which is at its bound."""
    case = fit_profiles.tide_case(name)
    costs = load_profile(name).costs(case.shape)
    num_weights = 3 * case.shape.hidden_size * case.shape.expert_size
    row_s = costs.host_s.at(2) - costs.host_s.at(1)
    fitted = fit_profiles.tide_machine(name, 2 * num_weights / row_s)
    for of in (lambda c: c.link_s, *(lambda c, n=n: c.host_s.at(n) for n in (1, 8, 512))):
        assert of(costs) == pytest.approx(of(fitted.costs(name, case.shape)), rel=1e-3)
    ratio = fit_profiles.tide_anchor(case, fit_profiles.Shipped(name))
    if fitted.host_bytes_per_s < fit_profiles.HOST_SHARE * fit_profiles.HARDWARE[name].host_bytes:
        assert ratio == pytest.approx(fit_profiles.TIDE_BASELINES[name], rel=0.05)


@pytest.mark.parametrize("name", fit_profiles.HARDWARE)
def test_no_papers_machine_is_faster_than_its_hardware(name: str) -> None:
    """Every curve against an expert's bytes and operations, at the rates of data sheets."""
    top, profile = fit_profiles.HARDWARE[name], load_profile(name)
    families = fit_profiles.FAMILIES if name == "dali-3090" else ()
    shapes = [simulated.published(family) for family in families]
    for shape in shapes or [fit_profiles.tide_case(name).shape]:
        costs = profile.costs(shape)
        num_weights = 3 * shape.hidden_size * shape.expert_size
        num_bytes = num_weights * fit_profiles.WEIGHT_BYTES[name]
        assert costs.link_s >= num_bytes / top.link_bytes
        for num_tokens in (1, 8, 64, 512):
            num_operations = 2 * num_weights * num_tokens
            host_s = max(num_bytes / top.host_bytes, num_operations / top.host_operations)
            assert costs.host_s.at(num_tokens) >= host_s
            device_s = max(num_bytes / top.device_bytes, num_operations / top.device_operations)
            assert costs.device_s.at(num_tokens) >= device_s


def test_runs_are_recorded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run = traces.Run("demo:chat", num_requests=2, num_rounds=1, new_tokens=3)
    [first, other] = traces.record_all([run, run._replace(for_calibration=True)])
    assert first.num_committed == 6 and first.passes[0].step.kind is StepKind.PREFILL
    assert not np.array_equal(first.hits()[0], other.hits()[0])
    path = next(tmp_path.rglob(traces.trace_path(Path(), run).name))
    before = path.stat().st_mtime_ns
    [again] = traces.record_all([run])
    assert np.array_equal(again.ids, first.ids) and path.stat().st_mtime_ns == before


def test_the_time_of_policies_is_that_of_passes_that_generate() -> None:
    trace = synth_trace(SHAPE, num_blocks=1, steps_per_block=3)
    setting = simulated.make_setting(trace, COSTS, 4)
    seconds = simulated.policy_s(recipe("lowtide"), setting, trace)
    assert len(seconds) == 3 * SHAPE.num_layers and (seconds > 0).all()


def test_a_sweep_of_tau_names_its_best() -> None:
    trace = synth_trace(SHAPE, num_blocks=2, steps_per_block=5)
    case = tau.Case("m", "synthetic", trace, trace, "none", COSTS, 32, None)
    setting = simulated.make_setting(trace, COSTS, 4)
    row = tau.sweep(case, setting, trace.hits())
    speeds = dict(zip(row["taus"], row["tokens_per_s_by_tau"], strict=True))
    assert list(speeds) == [1, 2, 3, 4, 5] and 0 < row["online_over_best"] < 1.1
    assert speeds[row["auto_tau"]] == max(speeds.values())
    assert row["paper_tau"] in speeds and len(row["random_tokens_per_s"]) == tau.NUM_DRAWS
    assert row["moved_by_tau"][0] >= row["moved_by_tau"][-1]


class Written:
    """A recorder that keeps its rows."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def write(self, what: str, values: dict[str, Any]) -> None:
        self.rows.append({"what": what, **values})


def test_a_number_of_dali_is_a_mean_over_cases() -> None:
    recorder = Written()
    numbers = dali.Numbers(recorder)
    numbers.write("Figure 12", "over HybriMoE", 1.32, [1.0, 4.0])
    numbers.write("Table 8", "a gain", 0.1, [-0.1, 0.3], neutral=0.0, repeats="Table 7")
    ratio, gain = recorder.rows
    assert [ratio[name] for name in ("here", "least", "most", "num_cases")] == [2.5, 1.0, 4.0, 2]
    assert ratio["what"] == "number" and ratio["geometric_mean"] == pytest.approx(2.0)
    assert ratio["neutral"] == 1 and "repeats" not in ratio
    assert gain["here"] == pytest.approx(0.1) and "geometric_mean" not in gain
    assert gain["neutral"] == 0 and gain["repeats"] == "Table 7"


def test_what_dali_is_compared_with() -> None:
    shape = SHAPE._replace(num_layers=4)
    trace = synth_decode_trace(shape, num_sequences=3, num_prompt=4, num_new=8)
    part = simulated.generating_passes(trace)
    hits = part.hits()
    case = dali.Case(part, simulated.make_setting(part, COSTS, 8, part), hits)
    assert case.seconds("hybrimoe") == simulate(part, "hybrimoe", case.setting).total_s
    assert list(dali.stage_gains("Mixtral-8x7B", case)) == ["+ greedy", "+ prefetch", "+ cache"]


def test_what_one_window_hits_more_than_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dali, "NUM_NEW", 16)
    recorder = Written()
    dali.window_hits(dali.Numbers(recorder), Namespace(layers=1))
    assert [row["published"] for row in recorder.rows] == [0.042, 0.071]
    [case] = dali.make_cases("DeepSeek-V2-Lite", (4,), 1)
    for row, windows in zip(recorder.rows, dali.FIGURE_18, strict=True):
        rates = [
            simulate(case.part, "dali", case.setting.having(w_size=w, u_size=u)).hit_rate
            for w, u in windows
        ]
        assert row["here"] == pytest.approx(rates[0] - rates[1]) and row["neutral"] == 0


def test_hits_over_an_answer_are_of_groups_of_eight_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dali, "NUM_NEW", 16)
    recorder = Written()
    dali.hits_over_tokens(dali.Numbers(recorder), Namespace(layers=2))
    [row] = recorder.rows
    assert row["place"] == "Figure 18" and row["published"] == 1.0
    assert 0 < row["tokens_8"] <= 1 and 0 < row["tokens_16"] <= row["here"] <= 1
    assert "tokens_24" not in row


def test_shares_of_planning_are_of_its_time_and_the_layer_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dali, "TABLE_6", {"dali": {2: 0.05, 4: 0.04}})
    recorder = Written()
    dali.scheduling(dali.Numbers(recorder), Namespace())
    assert [row["of"] for row in recorder.rows] == ["dali, 2 tokens", "dali, 4 tokens"]
    for row in recorder.rows:
        whole_us = row["planned_us"] + row["layer_us"]
        assert row["here"] == pytest.approx(row["planned_us"] / whole_us)


def test_the_greedy_is_never_above_the_optimum() -> None:
    shares = dali.optimum_shares("Mixtral-8x7B", 4, 2)
    assert len(shares) == 4 and all(0.5 <= share <= 1 + 1e-9 for share in shares)


def test_shares_of_what_hindsight_knows() -> None:
    trace = synth_decode_trace(SHAPE, num_sequences=2, num_prompt=4, num_new=8)
    cell = hindsight.measure_cell(
        trace, trace.hits(), simulated.make_setting(trace, COSTS, 8, trace)
    )
    assert cell["of_oracle"].keys() == cell["of_most_hits"].keys() == simulated.VARIANTS.keys()
    assert all(0 <= share <= 1 for share in cell["of_most_hits"].values())
    assert cell["of_oracle"]["lowtide"] > 0 < cell["over_best_other"]["lowtide"]


def test_the_exchange_of_parts_from_the_same_first_residents() -> None:
    trace = synth_decode_trace(SHAPE, num_sequences=3, num_prompt=4, num_new=8)
    setting = simulated.make_setting(trace, COSTS, 8)
    names = exchange.combinations()
    assert len(names) == len(set(names)) == 12
    seconds = {one: simulate(trace, exchange.combined(one), setting).total_s for one in names}
    assert seconds["dali", "dali", "dali"] == simulate(trace, "dali", setting).total_s
    first = [exchange.combined(one).policies(setting).placement.initial(1) for one in names]
    assert all(np.array_equal(experts, first[0]) for experts in first)
    doubled = {one: 2.0 if one[1] == "hybrimoe" else 1.0 for one in names}
    assert exchange.merits(doubled) == pytest.approx(
        {"placement": 1.0, "assignment": 2.0, "prefetch": 1.0}
    )


def answer_of(*experts: int) -> Trace:
    """One expert of four for each token, in one layer."""
    writer = TraceWriter("by hand", TraceShape(1, 4, 1))
    for index, expert in enumerate(experts):
        writer.append(Step(StepKind.DECODE, index), 0, np.array([[[expert]]]), num_committed=1)
    return writer.trace()


@pytest.mark.parametrize(
    ("of", "at", "num_skipped", "rate"),
    [
        ("in the last tokens", 1, 0, 1 / 4),
        ("in the last tokens", 2, 0, 1 / 3),
        ("in an LRU cache", 0.25, 0, 1 / 5),
        ("in an LRU cache", 0.5, 0, 2 / 5),
        ("in an LRU cache", 0.5, 1, 2 / 4),
        ("in an LRU cache", 1.0, 0, 2 / 5),
        ("among the answer's own favourites", 0.25, 0, 3 / 5),
        ("among another answer's favourites", 0.25, 0, 1 / 5),
        ("among another answer's favourites", 0.5, 0, 2 / 5),
    ],
)
def test_how_alike_tokens_are_routed(of: str, at: float, num_skipped: int, rate: float) -> None:
    trace, other = answer_of(0, 0, 1, 0, 2), answer_of(1, 1, 2, 3, 1, 2)
    measure = published_routing.MEASURES[of]
    assert measure(trace, other, at, num_skipped) == pytest.approx(rate)


def test_a_routing_is_fitted_to_what_was_measured() -> None:
    wanted = published_routing.Preference(0.6, 0.7, 0.5)
    model = published_routing.FITTED._replace(shape=TraceShape(2, 32, 4), num_tokens=96)
    rates = zip(model.rates, model.reached(wanted), strict=True)
    model = model._replace(rates=tuple(rate._replace(published=here) for rate, here in rates))
    found = locality.fitted(model, wanted._fields)
    assert model.reached(found) == pytest.approx(model.reached(wanted), abs=0.02)
    static = locality.fitted_static(model)
    assert static.skew > 0 == static.taste == static.locality


def test_a_preset_is_as_good_as_in_the_worse_routing() -> None:
    speeds = {
        ("disk", "local"): [{"a": 1.0, "b": 0.8}, {"a": 0.25, "b": 0.8}],
        ("disk", "static"): [{"a": 1.0, "b": 0.7}],
    }
    found = locality.verdict("disk", ["local", "static"], speeds)
    assert found["of_best"]["a"] == pytest.approx({"local": 0.5, "static": 1.0})
    assert found["order"] == ["b", "a"]


def test_presets_beside_the_fastest_and_what_auto_chooses() -> None:
    preference = published_routing.Preference(0.5, 0.5, 0.5)
    for home in locality.HOMES:
        cell = locality.measure_cell(preference, home, 1, 0.25, 2)
        speeds = cell["of_best"]
        assert max(speeds.values()) == 1 and speeds["auto"] == speeds[cell["auto_chooses"]]
        assert speeds.keys() - {"auto"} == cell["hit_rates"].keys()
