"""How fast a plan will be: arithmetic on what was measured, and how it is told."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide import LLM
from lowtide.cli.outlook import outlook, plan_line, prediction_object
from lowtide.core import Costs, Curve, MoEShape
from lowtide.engine import planning, prediction
from lowtide.engine.config import EngineConfig
from lowtide.engine.opening import OpenModel, open_model
from lowtide.engine.planning import make_plan
from lowtide.engine.prediction import even_demand, predictor_of, published_pass
from lowtide.hardware.machine import LAYERS, Machine, Rate, this_machine
from lowtide.hardware.store import keep_rates, kept_rates, rates_path
from lowtide.lab.synth import synth
from lowtide.llm import plan_in_full, plan_model
from lowtide.plan import Basis, MemoryPlan, Prediction, TierPlan

GIB = 1 << 30
RATES = (
    Rate("memory read", "B", 1e9, 0.1, 2e9),
    Rate("products in bfloat16", "FLOP", 1e10, 0.1, 1e10),
    Rate("products in float32", "FLOP", 1e10, 0.1, 1e10),
    Rate("disk, sequential, direct", "B", 1e8, 0.1, 1e8),
    Rate(LAYERS, "layers", 1e3, 0.1, 1e3),
)
COMPUTED = Curve([(1, 1e-3)])
ELSEWHERE = Machine("Abacus 9", 4, 1 << 34, "Linux 7", None)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    return {family: synth(family, "tiny", place / family) for family in ("qwen3_moe", "llada")}


def opened(folder: Path, **options: object) -> OpenModel:
    return open_model(str(folder), EngineConfig(device="cpu", **options))  # type: ignore[arg-type]


# What is kept.


def test_rates_that_are_kept_come_back_on_the_same_machine_only() -> None:
    assert kept_rates(ELSEWHERE) == ()
    keep_rates(ELSEWHERE, RATES)
    assert kept_rates(ELSEWHERE) == RATES
    assert kept_rates(replace(ELSEWHERE, num_cores=8)) == ()


@pytest.mark.parametrize("damage", ["", "{}", '{"rates": 1}', "per_s", "name"])
def test_a_damaged_file_of_rates_is_a_notice(damage: str, caplog: pytest.LogCaptureFixture) -> None:
    keep_rates(ELSEWHERE, RATES)
    path = rates_path(ELSEWHERE)
    content = json.loads(path.read_text())
    if damage in ("per_s", "name"):
        content["rates"][0][damage] = -1.0
        damage = json.dumps(content)
    path.write_text(damage)
    with caplog.at_level(logging.WARNING):
        assert kept_rates(ELSEWHERE) == ()
    assert caplog.text.count(str(path)) == 1 and ".." not in caplog.text.split(str(path))[1]


# Demand.


@given(
    num_experts=st.integers(2, 64),
    per_token=st.integers(1, 8),
    num_rows=st.integers(1, 600),
    num_residents=st.integers(0, 64),
)
def test_even_demand_is_within_what_can_be(
    num_experts: int, per_token: int, num_rows: int, num_residents: int
) -> None:
    shape = MoEShape(3, num_experts, min(per_token, num_experts), 64, 32)
    residents = (min(num_residents, num_experts),) * 3
    demand = even_demand(shape, plan_of(3 * num_experts, residents), num_rows)
    assert 0 < demand.num_run <= 3 * num_experts
    assert 0 <= demand.num_on_disk == demand.num_absent <= demand.num_run
    pairs = num_rows * shape.num_experts_per_token * 3
    assert demand.num_run * demand.num_tokens == pytest.approx(pairs)
    if num_rows == 1:
        assert demand.num_run == pytest.approx(3 * shape.num_experts_per_token)
    if residents[0] == num_experts:
        assert demand.num_on_disk == pytest.approx(0)


def plan_of(num_experts: int, residents: tuple[int, ...]) -> MemoryPlan:
    return MemoryPlan(
        host=TierPlan(GIB, 0, 0, 0, 0, 1, num_experts),
        context=64,
        max_rows=64,
        minimum_bytes=1,
        full_bytes=2,
        overhead_bytes=0,
        num_experts=num_experts,
        residents_per_layer=residents,
        policy="lowtide",
        reason="",
    )


# Predictions.


def test_nothing_is_predicted_before_anything_was_measured(folders: dict[str, Path]) -> None:
    plan = plan_model(folders["qwen3_moe"], device="cpu")
    assert plan.prediction is not None and plan.prediction.rests_on is Basis.NOTHING
    assert plan.prediction.tokens_per_s is None and plan.prediction.memory_bytes > 0
    told = outlook(plan, "a model")
    assert "unknown until `lowtide doctor 'a model'` has measured" in told
    with LLM(folders["qwen3_moe"], device="cpu") as llm:
        assert "predicted_tokens_per_s" not in llm.stats()


def test_a_machine_s_rates_give_a_floor_of_every_pass(folders: dict[str, Path]) -> None:
    keep_rates(this_machine(), RATES)
    model = opened(folders["qwen3_moe"])
    found = make_plan(model).prediction
    assert found is not None and found.pass_s is not None and found.rests_on is Basis.MACHINE
    assert found.num_rows == 1 and found.read_bytes == 0
    layers_s = model.config.num_layers / 1e3
    assert found.pass_s >= layers_s + found.memory_bytes / 1e9 * 0.999


def test_less_memory_is_slower_by_what_is_read(folders: dict[str, Path]) -> None:
    keep_rates(this_machine(), RATES)
    everything = make_plan(opened(folders["qwen3_moe"]))
    least = make_plan(opened(folders["qwen3_moe"], host_memory=everything.minimum_bytes))
    assert everything.prediction is not None and least.prediction is not None
    assert least.prediction.read_bytes > 0
    assert (least.prediction.pass_s or 0) > (everything.prediction.pass_s or 0)
    assert least.prediction.memory_bytes == everything.prediction.memory_bytes


def test_times_of_the_model_s_own_experts_come_first(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_rates(this_machine(), RATES)
    slow = Curve([(1, 1.0)])
    costs = Costs(1, 0.0, slow, slow, Curve([(1, 0.0)]), 0.0, disk_read_s=3.0)
    monkeypatch.setattr(prediction, "_kept_costs", lambda *args: costs)
    model = opened(folders["qwen3_moe"])
    plan = make_plan(model)
    predictor = predictor_of(model, plan)
    assert predictor is not None and predictor.rests_on is Basis.EXPERTS
    shape = model.config.moe_shape
    run_s = shape.num_layers * shape.num_experts_per_token
    found = predictor.prediction()
    assert found.pass_s == pytest.approx(run_s + model.config.num_layers / 1e3)
    assert predictor.tokens_per_s(10, 20, 20) == pytest.approx(0.5 / found.pass_s)


def test_reads_ahead_count_where_they_save_enough(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_rates(this_machine(), RATES)
    full = make_plan(opened(folders["qwen3_moe"]))
    budget = (full.minimum_bytes + full.full_bytes) // 2
    model = opened(folders["qwen3_moe"], host_memory=budget)
    plan = make_plan(model)
    dense_s, read_s = 0.1, 1.0
    costs = Costs(1, 0.0, COMPUTED, COMPUTED, Curve([(1, dense_s)]), 0.0, disk_read_s=read_s)
    monkeypatch.setattr(prediction, "_kept_costs", lambda *args: costs)
    monkeypatch.setattr(prediction, "_dense_bytes", lambda opened: prediction._layer_bytes(opened))
    found = predictor_of(model, plan)
    demand = even_demand(model.config.moe_shape, plan, 1)
    assert found is not None and demand.num_on_disk and plan.num_staging > 2
    besides_s = dense_s + model.config.num_layers / 1e3
    # Three quarters of what is read meanwhile is asked for.
    expected = besides_s + demand.num_on_disk * read_s - 0.75 * besides_s
    monkeypatch.setattr(prediction, "WORTH", 1.0)
    assert found.pass_s(1, demand) == pytest.approx(expected)
    monkeypatch.setattr(prediction, "WORTH", 0.5)
    assert found.pass_s(1, demand) == pytest.approx(besides_s + demand.num_on_disk * read_s)


def test_a_run_s_speed_stands_beside_its_prediction(folders: dict[str, Path]) -> None:
    keep_rates(this_machine(), RATES)
    with LLM(folders["qwen3_moe"], device="cpu") as llm:
        before = llm.stats()["predicted_tokens_per_s"]
        assert llm.plan.prediction is not None
        assert before == llm.plan.prediction.tokens_per_s
        llm.generate([[1, 2, 3]])
        stats = llm.stats()
    assert stats["predicted_tokens_per_s"] > 0 and stats["tokens_per_s"] > 0


def test_a_bidirectional_pass_has_the_whole_context(folders: dict[str, Path]) -> None:
    assert published_pass(opened(folders["llada"], context=300)) == (300, 2.0)
    assert published_pass(opened(folders["llada"], context=300, kv_cache="dual"))[0] == 128
    assert published_pass(opened(folders["qwen3_moe"])) == (1, 1.0)


# What is said.

KNOWN = Prediction(1, 1.0, 3e8, 9e8, 0.25, Basis.EXPERTS, 0.1)


def test_a_plan_says_what_is_read_how_fast_and_which_budget() -> None:
    plan = replace(plan_of(96, (8, 8)), prediction=KNOWN, advised_bytes=GIB, full_bytes=2 * GIB)
    told = outlook(plan, "m")
    assert "858.3 MiB of weights" in told and "286.1 MiB of them read from disk" in told
    assert "about 4 tokens/s" in told and "times of its experts" in told
    assert "--host-memory auto, now 1.0 GiB" in told and "everything takes 2.0 GiB" in told
    assert "16 of 96 experts resident (lowtide)" in plan_line(plan, "m")
    assert "about 4 tokens/s expected" in plan_line(plan, "m")
    held = outlook(replace(plan, advised_bytes=20 * GIB), "m")
    assert "--host-memory 20G, which holds everything" in held


def test_a_prediction_as_json() -> None:
    assert prediction_object(None) is None
    told = prediction_object(KNOWN)
    assert told is not None and told["tokens_per_s"] == 4.0 and told["rests_on"] == "experts"
    assert json.loads(json.dumps(told)) == told


def test_a_budget_that_fits_the_machine_but_not_what_is_free_is_a_warning(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "available_memory_bytes", lambda: 1000)
    plan = plan_model(folders["llada"], device="cpu", host_memory="1GiB")
    assert "1000 B are free now" in plan.reason
    assert plan.advised_bytes == 0 and "advised" not in outlook(plan, "m")


def test_speeds_by_format_rest_on_the_same(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times of the experts as they are stored say nothing beside rates of the machine."""
    folder = folders["qwen3_moe"]
    keep_rates(this_machine(), RATES)
    by_rates = plan_in_full(folder, context=64).by_format
    slow = Curve([(1, 1.0)])
    costs = Costs(1, 0.0, slow, slow, Curve([(1, 0.0)]), 0.0, disk_read_s=3.0)
    monkeypatch.setattr(
        prediction,
        "_kept_costs",
        lambda opened, *rest: costs if opened.options.format in (None, "own") else None,
    )
    found = plan_model(folder, context=64).prediction
    assert found is not None and found.rests_on is Basis.EXPERTS
    assert plan_in_full(folder, context=64).by_format == by_rates
