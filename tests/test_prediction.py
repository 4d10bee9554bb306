"""How fast a plan will be: arithmetic on what was measured, and how it is told."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.cli.answer import Answer
from lowtide.cli.generate import answer_line
from lowtide.cli.outlook import outlook, plan_line, prediction_object, speed_text, verdict
from lowtide.core import MoEShape
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.model import OpenModel, open_model
from lowtide.engine.planning import plan as planning
from lowtide.engine.planning import prediction
from lowtide.engine.planning.plan import make_plan
from lowtide.engine.planning.prediction import (
    DISAGREEMENT,
    ExpertCounts,
    PassCosts,
    Predictor,
    even_demand,
    predictor_of,
    published_pass,
)
from lowtide.hardware import machine, store
from lowtide.hardware.machine import (
    DISTURBED,
    LAYERS_OF_BLOCKS,
    LAYERS_OF_TOKENS,
    MOST_TRIES,
    PIECES_AT_ONCE,
    RATES_METHOD,
    Machine,
    Rate,
    rates_of,
    seconds_per_layer,
    this_machine,
)
from lowtide.hardware.store import keep_rates, kept_rates, rates_path
from lowtide.hardware.timing import Sample, Timing
from lowtide.hardware.weight_rates import KINDS, NUM_TOKENS, ROUNDING, kind_of
from lowtide.llm import LLM, plan_model
from lowtide.model_writing.synth import synth
from lowtide.plan import FormatPlan, MemoryPlan, PassTime, Prediction, SpeedRange, TierPlan

GIB = 1 << 30
PER_BYTE_S = 1e-9
RATES = (
    *(
        Rate(kind.rate_name(count), "B", 1 / PER_BYTE_S, 0.1, 1e9)
        for kind in KINDS
        for count in NUM_TOKENS
    ),
    *(Rate(name, "B", 1e8, 0.1, 1e8) for name in PIECES_AT_ONCE),
    *(
        Rate(name, "layers", 1e3, 0.1, 1e3)
        for name in (*LAYERS_OF_TOKENS.values(), *LAYERS_OF_BLOCKS.values())
    ),
)
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


def test_rates_that_an_older_version_kept_are_measured_again(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as older:
        older.setattr(store, "RATES_METHOD", RATES_METHOD - 1)
        keep_rates(this_machine(), RATES)
    assert kept_rates(this_machine()) == () and not caplog.records
    plan = plan_model(folders["qwen3_moe"], device="cpu")
    assert "unknown until `lowtide doctor` has measured" in outlook(plan, "a model")


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
    assert plan.prediction is not None
    assert plan.prediction.speed is None and plan.prediction.memory_bytes > 0
    assert "unknown until `lowtide doctor` has measured" in outlook(plan, "a model")
    assert verdict(plan, (), "a model") == "Fits. How fast, `lowtide doctor` finds out."
    with LLM(folders["qwen3_moe"], device="cpu") as llm:
        assert "predicted_tokens_per_s" not in llm.stats()


def test_a_pass_goes_through_its_weights_once(folders: dict[str, Path]) -> None:
    keep_rates(this_machine(), RATES)
    model = opened(folders["qwen3_moe"])
    found = make_plan(model).prediction
    assert found is not None and found.pass_time is not None
    assert found.num_rows == 1 and found.read_bytes == 0
    expected = model.facts.config.num_layers / 1e3 + found.memory_bytes * PER_BYTE_S
    assert found.pass_time.likely_s == pytest.approx(expected)


@pytest.mark.parametrize("names", [LAYERS_OF_TOKENS, LAYERS_OF_BLOCKS])
def test_a_layer_of_some_rows_takes_what_lies_between_those_measured(names: dict[int, str]) -> None:
    rates = [Rate(name, "layers", 1 / n, 0.1, 1.0) for n, name in names.items()]
    found = seconds_per_layer(rates, names)
    assert found is not None
    for num_rows in (min(names), 20, 32, 200, 2048):
        assert found.at(num_rows) == pytest.approx(num_rows)
    assert seconds_per_layer(rates[1:], names) is None


@pytest.mark.parametrize(
    ("model", "names", "others"),
    [
        ("qwen3_moe", LAYERS_OF_TOKENS, LAYERS_OF_BLOCKS),
        ("llada", LAYERS_OF_BLOCKS, LAYERS_OF_TOKENS),
        ("demo:diffusion", LAYERS_OF_BLOCKS, LAYERS_OF_TOKENS),
    ],
)
def test_a_model_s_layers_take_as_long_as_a_tiny_one_s_of_its_kind(
    folders: dict[str, Path], model: str, names: dict[int, str], others: dict[int, str]
) -> None:
    """Whether its rows are single tokens, or see each other."""
    this = opened(folders.get(model, Path(model)))
    predictor = predictor_of(this, make_plan(this))
    assert predictor is not None

    def taken_s(slow: str) -> float:
        rates = [
            rate._replace(per_s=rate.per_s / 3, ceiling=rate.per_s / 3)
            if rate.name == slow
            else rate
            for rate in RATES
        ]
        keep_rates(this_machine(), rates)
        found = predictor.pass_time(32)
        assert found is not None
        return found.likely_s

    more_s = taken_s(names[32]) - taken_s("")
    assert more_s == pytest.approx(this.facts.config.num_layers * 2e-3)
    assert taken_s(others[32]) == taken_s(names[8]) == taken_s("")


def test_less_memory_is_slower_by_what_is_read(folders: dict[str, Path]) -> None:
    keep_rates(this_machine(), RATES)
    everything = make_plan(opened(folders["qwen3_moe"])).prediction
    least_bytes = make_plan(opened(folders["qwen3_moe"])).minimum_bytes
    least = make_plan(opened(folders["qwen3_moe"], host_memory=least_bytes)).prediction
    assert everything is not None and least is not None
    assert least.read_bytes > 0 and least.memory_bytes == everything.memory_bytes
    assert least.pass_time is not None and everything.pass_time is not None
    assert least.pass_time.likely_s > everything.pass_time.likely_s


def test_rounding_as_weights_are_read_takes_the_cores_time(folders: dict[str, Path]) -> None:
    rounding = [Rate(name, "B", 1e6, 0.1, 1e6) for name in ROUNDING.values()]
    times = []
    for kept in (RATES, (*RATES, *rounding)):
        keep_rates(this_machine(), kept)
        least = make_plan(opened(folders["qwen3_moe"], format="q4")).minimum_bytes
        plan = make_plan(opened(folders["qwen3_moe"], format="q4", host_memory=least))
        assert plan.prediction is not None and plan.prediction.pass_time is not None
        times.append(plan.prediction.pass_time.likely_s)
    assert times[1] > times[0]


@pytest.mark.parametrize(
    ("format", "bits", "dtype", "rounds_rows", "name"),
    [
        ("", 16.0, torch.bfloat16, True, "bfloat16"),
        ("", 16.0, torch.float16, False, "float32"),
        ("", 32.0, torch.bfloat16, False, "float32"),
        ("gptq", 8.25, torch.bfloat16, True, "q8 by int8 rows"),
        ("Q4_K", 4.5, torch.float32, False, "q4"),
        ("Q2_K", 2.625, torch.bfloat16, False, "Q3_K"),
        ("IQ4_XS", 4.25, torch.bfloat16, False, "q4"),
        ("IQ2_XXS", 2.0625, torch.bfloat16, False, "IQ2_XS"),
        ("IQ3_XXS", 3.0625, torch.bfloat16, True, "IQ3_S by int8 rows"),
    ],
)
def test_a_format_is_as_fast_as_the_nearest_of_its_sort(
    format: str, bits: float, dtype: torch.dtype, rounds_rows: bool, name: str
) -> None:
    assert kind_of(format, bits, dtype, rounds_rows).name == name


def test_an_expert_costs_what_its_own_format_does(folders: dict[str, Path]) -> None:
    slow = [
        rate._replace(per_s=rate.per_s / 3, ceiling=rate.per_s / 3)
        if rate.name.startswith("weights in q4,")
        else rate
        for rate in RATES
    ]
    keep_rates(this_machine(), slow)
    model = opened(folders["qwen3_moe"], expert_dtype="q4")
    plan = make_plan(model)
    found, demand = plan.prediction, even_demand(model.facts.config.moe_shape, plan, 1)
    assert found is not None and found.pass_time is not None
    more_bytes = 2 * demand.num_run * model.memory.experts.layout.num_bytes
    expected = model.facts.config.num_layers / 1e3 + (found.memory_bytes + more_bytes) * PER_BYTE_S
    assert found.pass_time.likely_s == pytest.approx(expected, rel=0.02)


COSTS = st.floats(1e-6, 1.0)


@given(
    costs=st.builds(PassCosts, *[COSTS] * 5, st.floats(DISAGREEMENT, 9)),
    run=COSTS,
    absent=COSTS,
    saved_s=COSTS,
)
def test_a_pass_is_likely_to_take_what_lies_in_its_range(
    costs: PassCosts, run: float, absent: float, saved_s: float
) -> None:
    demand = ExpertCounts(run, 1.0, run * absent, run * absent)
    least_s, likely_s, most_s = costs.pass_time(demand)
    assert 0 < least_s < likely_s < most_s
    assert costs.pass_time(demand, saved_s).likely_s <= likely_s


def test_reads_ahead_count_where_they_save_enough(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_rates(this_machine(), RATES)
    full = make_plan(opened(folders["qwen3_moe"]))
    budget = (full.minimum_bytes + full.full_bytes) // 2
    model = opened(folders["qwen3_moe"], host_memory=budget)
    plan = make_plan(model)
    costs = PassCosts(dense_s=0.1, expert_s=1e-3, absent_s=0.0, read_s=1.0)
    monkeypatch.setattr(Predictor, "_host_costs", lambda *args: costs)
    found = predictor_of(model, plan)
    demand = even_demand(model.facts.config.moe_shape, plan, 1)
    assert found is not None and demand.num_on_disk and plan.num_staging > 2
    # Three quarters of what is read meanwhile is asked for.
    expected = costs.dense_s + demand.num_on_disk - 0.75 * costs.dense_s
    for worth, likely_s in ((1.0, expected), (0.5, costs.dense_s + demand.num_on_disk)):
        monkeypatch.setattr(prediction, "WORTH", worth)
        taken = found.pass_time(1)
        assert taken is not None and taken.likely_s == pytest.approx(likely_s)


def test_there_is_one_prediction_for_a_run(folders: dict[str, Path]) -> None:
    """What is said before an answer is what is said after it, whatever was asked."""
    keep_rates(this_machine(), RATES)
    with LLM(folders["qwen3_moe"], device="cpu") as llm:
        prediction = llm.plan.prediction
        assert prediction is not None and prediction.speed is not None
        for prompt, num_new in (([], 0), ([1, 2, 3], 32), ([1] * 40, 8)):
            if num_new:
                llm.generate([prompt], max_tokens=num_new, ignore_eos=True)
            stats = llm.stats()
            names = [f"predicted_tokens_per_s{end}" for end in ("_least", "", "_most")]
            assert tuple(stats[name] for name in names) == prediction.speed
        [completion] = llm.generate([[1, 2, 3]], max_tokens=4, ignore_eos=True)
        expected = f"{speed_text(prediction.speed)} expected"
        assert plan_line(llm.plan, "m").endswith(expected)
        after = answer_line(Answer([completion], 1.0), llm, is_verbose=True)
        assert expected in after and after.count("expected") == 1
        assert (
            answer_line(Answer([completion], 1.0), llm, is_verbose=False)
            == "4 tokens · 4.0 tokens/s"
        )


def test_counted_rows_are_of_answers(folders: dict[str, Path]) -> None:
    """Others', such as those of `logits`, have many more rows than a token's."""
    with LLM(folders["qwen3_moe"], device="cpu") as llm:
        llm.generate([[1, 2, 3]], max_tokens=8, ignore_eos=True)
        before = llm.stats()
        llm.logits([1, 2, 3] * 40)
        after = llm.stats()
    assert before["num_rows"] == after["num_rows"] == 3 + 7


@given(spreads=st.lists(st.floats(0, 4), min_size=len(RATES), max_size=len(RATES)))
def test_a_range_is_as_wide_as_what_was_measured_was_restless(
    spreads: list[float], folders: dict[str, Path]
) -> None:
    rates = [rate._replace(spread=spread) for rate, spread in zip(RATES, spreads, strict=True)]
    keep_rates(this_machine(), RATES)
    quiet = make_plan(opened(folders["qwen3_moe"])).prediction
    keep_rates(this_machine(), rates)
    found = make_plan(opened(folders["qwen3_moe"])).prediction
    assert found and found.pass_time and quiet and quiet.pass_time
    wider = max(1, (1 + median(spreads)) / DISAGREEMENT)
    assert found.pass_time.likely_s == quiet.pass_time.likely_s
    assert found.pass_time.most_s == pytest.approx(quiet.pass_time.most_s * wider)
    assert found.pass_time.least_s == pytest.approx(quiet.pass_time.least_s / wider)


def test_a_disturbed_rate_is_not_kept_and_one_before_it_stays() -> None:
    first, second, *_ = RATES
    disturbed = [rate._replace(per_s=rate.ceiling / 2) for rate in (first, second)]
    keep_rates(ELSEWHERE, [first])
    keep_rates(ELSEWHERE, disturbed)
    assert kept_rates(ELSEWHERE) == (first,)
    specified = disturbed[1]._replace(is_specified=True)  # a link's ceiling is no repeat
    keep_rates(ELSEWHERE, [specified])
    assert kept_rates(ELSEWHERE) == (specified,)


@given(st.lists(st.lists(st.floats(1, 9), min_size=3, max_size=15), min_size=1, max_size=4))
def test_what_was_disturbed_is_measured_again(rounds: list[list[float]]) -> None:
    """The fastest of the tries is taken, and judged by the best repeat of all of them."""
    tries = iter(rounds + [[1.0, 1.0, 1.0]] * MOST_TRIES)
    taken: list[list[float]] = []

    def timed(samples: Sequence[Sample], limit_s: float) -> list[Timing]:
        taken.append(next(tries))
        times = taken[-1]
        return [Timing(median(times), min(times), max(times), len(times)) for _ in samples]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "repeat_interleaved", timed)
        [rate] = rates_of({"a": lambda: 1.0}, "B", 1.0)
    best_s, median_s = min(map(min, taken)), min(map(median, taken))
    assert rate.per_s == pytest.approx(1 / median_s) and rate.ceiling == pytest.approx(1 / best_s)
    assert rate.is_disturbed == (rate.ceiling > DISTURBED * rate.per_s)
    assert 1 <= len(taken) <= MOST_TRIES and (not rate.is_disturbed or len(taken) == MOST_TRIES)


def test_a_bidirectional_pass_has_the_whole_context(folders: dict[str, Path]) -> None:
    def published(name: str, **options: object) -> tuple[int, float, float]:
        model = opened(folders[name], **options)
        cache_mode, context = model.options.asked.cache_mode, model.memory.context.num_tokens
        return published_pass(model.facts.config.decoding, cache_mode, context)

    assert published("llada", context=300) == (300, 2.0, 2.0)
    assert published("llada", context=300, kv_cache="dual")[0] == 128
    assert published("qwen3_moe") == (1, 1.0, 1.0)


# What is said.

KNOWN = Prediction(1, 1.0, 1.0, 3e8, 9e8, PassTime(0.05, 0.25, 0.5), 0.1)


def test_a_plan_says_what_is_read_how_fast_and_which_budget() -> None:
    plan = replace(plan_of(96, (8, 8)), prediction=KNOWN, advised_bytes=GIB, full_bytes=2 * GIB)
    told = outlook(plan, "m")
    assert "858.3 MiB of weights" in told and "286.1 MiB of them read from disk" in told
    assert "about 4 tokens/s (2 to 20)" in told and "lowtide doctor measured here" in told
    assert "--host-memory auto, now 1.0 GiB" in told and "everything takes 2.0 GiB" in told
    assert "16 of 96 experts in memory (lowtide)" in plan_line(plan, "m")
    assert "about 4 tokens/s (2 to 20) expected" in plan_line(plan, "m")
    held = outlook(replace(plan, advised_bytes=20 * GIB), "m")
    assert "--host-memory 20G, which holds everything" in held


def test_a_prediction_as_json() -> None:
    assert prediction_object(None) is None
    told = prediction_object(KNOWN)
    assert told is not None and told["tokens_per_s"] == {"least": 2.0, "likely": 4.0, "most": 20.0}
    assert json.loads(json.dumps(told)) == told


def test_the_verdict_comes_first() -> None:
    own = FormatPlan("own", 4, 16 / 96, KNOWN.speed)
    q4 = FormatPlan("q4", 1, 1.0, SpeedRange(60.0, 95.4, 120.0))
    plan = replace(plan_of(96, (8, 8)), prediction=KNOWN)
    assert verdict(plan, (own, q4), "m") == (
        "Runs, with 17% of the experts in memory. About 4 tokens/s (2 to 20). "
        "With --format q4 about 95; it may change answers."
    )
    whole = replace(plan, residents_per_layer=(48, 48))
    assert verdict(whole, (), "m") == "Fits. About 4 tokens/s (2 to 20)."


def test_a_budget_that_fits_the_machine_but_not_what_is_free_is_a_warning(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "available_memory_bytes", lambda: 1000)
    plan = plan_model(folders["llada"], device="cpu", host_memory="1GiB")
    assert "1000 B are free now" in plan.reason
    assert plan.advised_bytes == 0 and "advised" not in outlook(plan, "m")
