"""Comparisons and judgements of the benchmarks of substitution; no speed is measured here."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from buddy_cases import routed_facts

from lowtide import LLM, SamplingParams
from lowtide.config import Blocks, Causal, Decoding
from lowtide.core import RoutedTokens
from lowtide.kernels.cpu.library import load_part
from lowtide.kernels.cpu.sources import DECISIONS
from lowtide.lab.quality import Passes, Row
from lowtide.lab.quality_scores import Comparison, RowScores, ScoredRows
from lowtide.llm import plan_model
from lowtide.model_folder.demo_tasks import held_out_text
from lowtide.model_folder.model_config import load_config
from lowtide.policies.presets import unregister

buddies, buddy, buddy_full, buddy_time = map(
    import_module, ("common.buddies", "buddy", "buddy_full", "buddy_time")
)
format_quality = import_module("format_quality")
baselines, texts = map(import_module, ("common.baselines", "common.texts"))
SCALE = buddies.Scale(4, 32)
SPEC = load_config(Path(__file__).parent / "goldens" / "llada2-a").moe
# Experts 0, 1 and 2 are here; 3, 4 and 5 are not.
HERE = np.array([True, True, True, False, False, False])
ROUTING = RoutedTokens(
    np.array([[0, 3, 4], [1, 2, 5]]), np.array([[0.2, 0.5, 0.3], [0.3, 0.3, 0.4]], np.float32)
)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    baselines.register_baselines("lru", SPEC)
    yield
    for name in baselines.BASELINES:
        unregister(name)


def test_drop_adds_nothing_in_place_of_the_absent() -> None:
    answer = baselines.Drop(3)(routed_facts(ROUTING, HERE))
    assert answer is not None and answer.experts.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert answer.weights.tolist() == np.float32([[0.2, 0, 0], [0, 0.3, 0.3]]).tolist()
    few = baselines.RandomBuddy(1)(routed_facts(ROUTING, HERE))
    assert few is not None and few.experts[1].tolist() == [0, 1, 2] and 4 in few.experts[0]


def test_cache_prior_chooses_again_and_weighs_as_the_router_does() -> None:
    logits = np.float32([[2.0, 1.5, 0.0, 1.9, 1.0, -5.0]])
    routing = RoutedTokens(np.array([[0, 3]]), np.zeros((1, 2), np.float32), logits)
    spec = replace(SPEC, score_function="softmax", norm_topk_prob=True, scaling_factor=2.0)
    facts = routed_facts(routing, HERE)
    assert baselines.CachePrior(0.3, spec)(facts) is None
    answer = baselines.CachePrior(0.5, spec)(facts)
    assert answer is not None and answer.experts.tolist() == [[0, 1]]
    share = 1 / (1 + np.exp(-0.5))
    assert answer.weights[0] == pytest.approx([2 * share, 2 * (1 - share)])


@pytest.mark.parametrize("name", baselines.BASELINES)
def test_a_baseline_runs_within_its_bound(name: str) -> None:
    model = Path(__file__).parent / "goldens" / "llada2-a"
    options: dict[str, Any] = {"device": "cpu", "context": 128, "policy": name}
    plan = plan_model(model, **options)
    budget = (plan.minimum_bytes + plan.full_bytes) // 2
    for max_mass in ("0.02", "off"):
        told = {**options, "host_memory": budget, "policy_options": {"max_mass": max_mass}}
        with LLM(model, **told) as llm:
            params = SamplingParams(max_tokens=12, ignore_eos=True)
            [completion] = llm.generate([[7, 3, 20, 9, 4]], params)
        receipt = completion.usage.receipt
        assert receipt is not None and receipt.num_substituted > 0
        assert max_mass == "off" or receipt.moved_share <= 0.02


def test_every_lane_is_a_setting() -> None:
    lanes = buddies.lanes(SCALE, "lru")
    assert len({lane.name for lane in lanes}) == len(lanes)
    assert lanes[0].setting(0.5).is_lossless
    for lane in lanes[1:]:
        setting = lane.setting(0.5)  # its options are checked
        assert not setting.is_lossless
    rhos = {lane.name for lane in lanes if lane.name.startswith("buddy rho")}
    assert {f"random{name.removeprefix('buddy')}" for name in rhos} <= {x.name for x in lanes}
    papers = {
        "buddy rho 3",
        "buddy rho none",
        "buddy alpha .75, k_max 2",
        "buddy alpha .99, k_max 1",
    }
    assert papers <= {lane.name for lane in lanes}
    for lane in buddy_full.make_lanes("lru", buddies.Scale(8, 128)):
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
    lanes = buddies.lanes(SCALE, "lru")
    losses = {"random rho 2": 0.6, "random rho none": 0.8, "buddy rho 2": 0.3, "drop rho 2": 0.5}
    losses |= {"ours rho 2": 0.001, "ours rho 1": 0.5, "buddy with gates": 0.2}
    cell = make_cell(lanes, losses)
    found = {row["claim"]: row for row in buddy.expectations(cell, lanes)}
    assert found["buddy rho 2 loses less than random rho 2"]["is_met"]
    assert found["buddy rho 2 loses less than random rho none"]["is_met"]
    removed = found["buddy rho 2 removes 50% of random's loss"]
    assert removed["is_met"] and removed["removed"] == pytest.approx(1 - 0.3 / 0.8, abs=0.02)
    assert found["buddy rho 2 moves 20% fewer bytes"]["saved"] == pytest.approx(0.3)
    speed = found["ours rho 2 is 1.3 times as fast and loses 1% of accuracy"]
    assert speed["speed_up"] is None and not speed["is_met"] and speed["accuracy_lost"] == 0
    worse = make_cell(lanes, {**losses, "buddy rho 2": 0.6})
    found = {row["claim"]: row for row in buddy.expectations(worse, lanes)}
    assert not found["buddy rho 2 loses less than random rho 2"]["is_met"]
    assert not found["buddy rho 2 removes 50% of random's loss"]["is_met"]
    row = buddy.lane_row(cell, lanes[1])
    assert row["loss_difference"]["mean"] == pytest.approx(losses[lanes[1].name], abs=0.02)
    assert row["policy_options"]["miss"] == "random"


def test_decisions_are_timed_where_something_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buddy_time, "NUM_LAYERS", 2)
    profile, twins = buddy_time.make_profile(), buddy_time.CompiledBuddies(load_part(DECISIONS))
    for has_device in (False, True):
        case = buddy_time.make_case(buddy_time.LANES["late"], has_device, 3, profile, twins)
        for asked, run in zip(case.facts, case.runs, strict=True):
            assert (asked.routing.experts != run.routing.experts).any()
        row = buddy_time.measure_case(case, 1, 1)
        assert 0 < row["substitute_us"] and 0 < row["both_us"] and 0 < row["settle_us"]
    late = {"substitute_us": 10.0, "both_us": 101.0}
    assert buddy_time.judge("late", 1, late) == {
        "is_short_at_one": True,
        "are_both_short": False,
    }


def test_lanes_are_timed_and_those_that_substitute_are_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the script, on a tiny model: what a decision takes is said where one is asked for."""
    ids = np.random.default_rng(0).integers(1, 300, 6000).tolist()
    monkeypatch.setattr(buddies, "token_ids", lambda llm, text: ids)
    monkeypatch.setattr(buddy_full, "memory_ceiling", dict)
    monkeypatch.setattr(buddy_full.Disk, "measure", lambda self: {})
    out = tmp_path / "lines.jsonl"
    folders = ["--folder", str(tmp_path), "--out", str(out)]
    small = ["--size", "tiny", "--new", "6", "--repeats", "1", *folders]
    monkeypatch.setattr(sys, "argv", ["buddy_full", "--families", "deepseek_v2", *small])
    buddy_full.main()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    lanes = {line["what"]: line for line in lines if "tokens_per_s" in line}
    assert list(lanes) == [
        "exact",
        *(f"buddy rho {rho}" for rho in "2 3 none".split()),
        "ours rho 2",
    ]
    for name, line in lanes.items():
        assert len(line["each_waited_ms"]) == buddy_full.WATCHED and line["misses_per_pass"] > 0
        assert name == "exact" or len(line["each_substitution_us"]) == buddy_full.WATCHED
    claims = [line["claim"] for line in lines if line["what"] == "expected"]
    assert len(claims) == len(set(claims)) == 2 * (len(lanes) - 1)


@pytest.mark.parametrize(("decoding", "num_new"), [(Causal(), 32), (Blocks(), 63)])
def test_at_published_dimensions_no_prompt_is_timed(decoding: Decoding, num_new: int) -> None:
    """Its rows are exact, so their reads would be the same in every lane."""
    options = SimpleNamespace(new=32, steps=4)
    load = buddy_full.make_load(SimpleNamespace(decoding=decoding), options)
    assert len(load.prompt) == 1 and load.params.max_tokens == num_new
    assert load.params.temperature == 1.0 and load.params.seed is None


def test_a_demo_is_calibrated_on_questions_that_it_is_not_scored_on() -> None:
    asked, scored = (
        set(text.split("<|user|>")[1:]) for text in (texts.text_for("demo:chat"), held_out_text())
    )
    assert len(asked) > 500 and len(scored) > 100 and not asked & scored
    assert texts.text_for("a/demo-12-layers") == texts.text_for("demo:chat")
    assert "def text_for" not in texts.text_for("synth:llada2") and "class LLM" in texts.text_for(
        "x"
    )


def test_formats_are_lanes_beside_the_model_as_stored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "lines.jsonl"
    chosen = {name: format_quality.FORMATS[name] for name in ("own", "q4, int8 activations")}
    monkeypatch.setattr(format_quality, "FORMATS", chosen)
    options = SimpleNamespace(tokens=48, repeats=1, new=4)
    recorder = format_quality.Recorder("format quality", {"tokens": 48}, out)
    format_quality.measure(recorder, "demo:autoregressive", held_out_text()[:4000], options)
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
