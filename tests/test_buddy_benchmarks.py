"""What the benchmarks of substitution compare, and how they judge it; no speed is measured here."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from buddy_cases import random_profile

from lowtide.lab.demo_text import held_out_text
from lowtide.lab.quality import Passes, Row
from lowtide.lab.quality_scores import Comparison, RowScores, ScoredRows
from lowtide.policies.presets import check_safe

buddies, buddy, buddy_full, buddy_time = map(
    import_module, ("common.buddies", "buddy", "buddy_full", "buddy_time")
)
buddy_profile, format_quality = map(import_module, ("buddy_profile", "format_quality"))
SCALE = buddies.Scale(4, 32)


def test_the_papers_numbers_go_by_proportion() -> None:
    assert SCALE.rhos() == ("2", "3", "none")
    assert [SCALE.k_max(n) for n in (16, 4, 2)] == ["8", "2", "1"]
    assert buddies.Scale(6, 64).rhos() == ("3", "4", "none")
    assert buddies.Scale(6, 64).k_max(16) == "16"


@pytest.mark.parametrize("is_short", [True, False])
def test_every_lane_is_a_setting_and_baselines_are_unsafe(is_short: bool) -> None:
    lanes = buddies.lanes(SCALE, "lru", is_short=is_short)
    assert len({lane.name for lane in lanes}) == len(lanes)
    assert lanes[0].setting(0.5).is_lossless
    for lane in lanes[1:]:
        setting = lane.setting(0.5)  # its options are checked
        assert not setting.is_lossless
        if lane.miss in buddies.BASELINES:
            with pytest.raises(Exception, match="unsafe"):
                check_safe(setting.policy, setting.policy_options)
        else:
            check_safe(setting.policy, setting.policy_options)
    rhos = {lane.name for lane in lanes if lane.name.startswith("buddy rho")}
    assert {f"random{name.removeprefix('buddy')}" for name in rhos} <= {x.name for x in lanes}
    for lane in buddy_full._lanes("lru", 8):
        lane.setting(0.5)


def make_cell(lanes: list[Any], losses: dict[str, float], share: float = 0.375) -> Any:
    """A cell in which each lane loses so much on every token, give or take."""
    random = np.random.default_rng(0)
    base, ones = random.exponential(2.0, 640), np.ones(640)
    scored = ScoredRows(np.zeros(640, np.int64), np.arange(640) // 32)
    exact = RowScores(base, 0 * ones, ones, ones)
    rows = {}
    for lane in lanes:
        lost = losses.get(lane.name, 0.0)
        noise = 0.05 * random.normal(size=640) if lost else 0.0
        scores = RowScores(base + lost + noise, lost * ones, ones, ones * (lost < 0.3))
        row = Row(lane.setting(share), scores=scores)
        row.comparison = Comparison.of(scores, exact, scored)
        counts = {"num_hits": 1.0, "num_misses": 1.0, "read_bytes": 1e6 * (1 - lost)}
        row.passes = Passes(640, 640, 1.0 / (1 + lost), counts)
        rows[lane.name] = row
    report: Any = SimpleNamespace(rows=tuple(rows.values()), scored=scored)
    return buddy.Cell("m", "disk", share, rows, report)


def test_claims_are_met_where_the_numbers_say_so() -> None:
    lanes = buddies.lanes(SCALE, "lru", is_short=True)
    losses = {"random rho 2": 0.6, "random rho none": 0.8, "buddy rho 2": 0.3, "drop rho 2": 0.5}
    losses |= {"ours rho 2": 0.001, "ours rho 1": 0.5, "buddy with gates": 0.2}
    cell = make_cell(lanes, losses)
    found = {row["claim"]: row for row in buddy._expectations(cell, lanes)}
    assert found["buddy rho 2 loses less than random rho 2"]["is_met"]
    assert found["buddy rho 2 loses less than random rho none"]["is_met"]
    removed = found["buddy rho 2 removes 50% of random's loss"]
    assert removed["is_met"] and removed["removed"] == pytest.approx(1 - 0.3 / 0.8, abs=0.02)
    assert found["buddy rho 2 moves 20% fewer bytes"]["saved"] == pytest.approx(0.3)
    speed = found["ours rho 2 is 1.3 times as fast and loses 1% of accuracy"]
    assert speed["speed_up"] is None and not speed["is_met"] and speed["accuracy_lost"] == 0
    worse = make_cell(lanes, {**losses, "buddy rho 2": 0.6})
    found = {row["claim"]: row for row in buddy._expectations(worse, lanes)}
    assert not found["buddy rho 2 loses less than random rho 2"]["is_met"]
    assert not found["buddy rho 2 removes 50% of random's loss"]["is_met"]
    row = buddy._row(cell, lanes[1], {r.setting.label: True for r in cell.rows.values()})
    assert row["loss_difference"]["mean"] == pytest.approx(losses[lanes[1].name], abs=0.02)


def test_decisions_are_timed_where_something_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buddy_time, "NUM_LAYERS", 2)
    profile, twins = buddy_time._profile(), buddy_time.CompiledBuddies.load()
    for has_device in (False, True):
        case = buddy_time._case(buddy_time.LANES["late"], has_device, 3, profile, twins)
        for asked, run in zip(case.facts, case.runs, strict=True):
            assert (asked.routing.experts != run.routing.experts).any()
        row = buddy_time._row(case, 1, 1)
        assert 0 < row["substitute_us"] and 0 < row["both_us"] and 0 < row["settle_us"]
        assert row["cold_us"] > 0
    late = {"substitute_us": 10.0, "both_us": 101.0}
    assert buddy_time._judged("late", 1, late) == {
        "is_short_at_one": True,
        "are_both_short": False,
    }


@pytest.mark.parametrize(("is_diffusion", "num_new"), [(False, 32), (True, 63)])
def test_at_published_dimensions_no_prompt_is_timed(is_diffusion: bool, num_new: int) -> None:
    """Its rows are exact, so their reads would be the same in every lane."""
    options = SimpleNamespace(new=32, steps=4)
    load = buddy_full._load(SimpleNamespace(is_diffusion=is_diffusion), options)
    assert len(load.prompt) == 1 and load.params.max_tokens == num_new
    assert load.params.temperature == 1.0 and load.params.seed is None


def test_a_profile_is_told_layer_by_layer() -> None:
    rows = list(buddy_profile.layer_rows(random_profile(3, 16, 2)))
    assert len(rows) == 3
    for row in rows:
        peers = [row["peers_of_alpha"][alpha] for alpha in ("0.5", "0.75", "0.9", "0.95", "0.99")]
        assert peers == sorted(peers) and 1 <= peers[0] and peers[-1] <= 15
        assert row["least_chosen"] <= 1 <= row["most_chosen"] and row["likeness"] is None


def test_formats_are_lanes_beside_the_model_as_stored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "lines.jsonl"
    chosen = {name: format_quality.FORMATS[name] for name in ("own", "q4, int8 activations")}
    monkeypatch.setattr(format_quality, "FORMATS", chosen)
    options = SimpleNamespace(tokens=48, repeats=1, new=4)
    recorder = format_quality.Recorder("format quality", {"tokens": 48}, out)
    format_quality._measure(recorder, "demo:autoregressive", held_out_text()[:4000], options)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["budget_share"], line["what"]) for line in lines] == [
        (share, name) for share in (1.0, 0.25) for name in chosen
    ]
    own, rounded, few_own, few_rounded = lines
    assert own["kl"]["mean"] == few_own["kl"]["mean"] == 0 < rounded["kl"]["mean"]
    assert rounded["kl"] == few_rounded["kl"]  # budgets change nothing
    assert rounded["weight_bytes"] < own["weight_bytes"] / 2
    assert few_own["resident_share"] < few_rounded["resident_share"]
    assert few_own["read_bytes_per_pass"] > own["read_bytes_per_pass"] == 0
