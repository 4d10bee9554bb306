"""How fast a plan will be: what a model's first load and its own runs left, and how it is told."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.answers import loaded
from lowtide.cli.answer import Answer, ask
from lowtide.cli.generate import answer_line
from lowtide.cli.outlook import outlook, plan_line, prediction_object, speed_text, verdict
from lowtide.core import MoEShape
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.model import OpenModel, open_model
from lowtide.engine.planning import plan as planning
from lowtide.engine.planning.plan import make_plan
from lowtide.engine.planning.prediction import (
    DOUBT,
    MISS_POWER,
    USUAL_TOKENS,
    even_demand,
    published_pass,
    slots_lent,
    speed_key,
)
from lowtide.engine.running import first_passes, own_run
from lowtide.engine.running.own_run import MIN_PASSES, TimedPass
from lowtide.hardware import machine, store
from lowtide.hardware.machine import (
    DISK_READ,
    DISTURBED,
    MEMORY_READ,
    MOST_TRIES,
    PIECES_AT_ONCE,
    RATES_METHOD,
    Machine,
    Rate,
    rates_of,
    this_machine,
)
from lowtide.hardware.model_speeds import (
    MAX_FILES,
    MAX_RUNS,
    ModelSpeeds,
    OwnRun,
    SpeedKey,
    keep_speeds,
    kept_speeds,
)
from lowtide.hardware.store import keep_rates, kept_rates, rates_path
from lowtide.hardware.timing import Sample, Timing
from lowtide.kernels.choice import possible_names
from lowtide.llm import LLM, plan_model
from lowtide.model_writing.synth import synth
from lowtide.params import SamplingParams
from lowtide.plan import FormatPlan, MemoryPlan, PassTime, Prediction, SpeedRange, TierPlan

GIB = 1 << 30
RATES = (
    Rate(MEMORY_READ, "B", 1e9, 0.1, 1e9),
    Rate(DISK_READ, "B", 2e8, 0.1, 2e8),
    *(Rate(name, "B", 1e8, 0.1, 1e8) for name in PIECES_AT_ONCE),
)
SPEEDS = ModelSpeeds(passes=((1, 0.01), (4, 0.02)), reads=((1, 1e-3), (8, 4e-3)))
RUN = OwnRun(10, 63, 1.0, 1.0, 0.012, 0.003, 2.0)
ELSEWHERE = Machine("Abacus 9", 4, 1 << 34, "Linux 7", None)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads measure the model, and runs are kept, as outside of tests."""
    monkeypatch.setattr(loaded, "with_prediction", first_passes.with_prediction)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    return {family: synth(family, "tiny", place / family) for family in ("qwen3_moe", "llada")}


def opened(folder: Path, **options: object) -> OpenModel:
    return open_model(str(folder), EngineConfig(device="cpu", **options))  # type: ignore[arg-type]


def key_of(model: OpenModel) -> SpeedKey:
    facts = model.speed_facts
    return speed_key(facts, possible_names(facts.kernels, facts.memory.dtype)[0])


def keep(model: OpenModel, speeds: ModelSpeeds) -> None:
    keep_speeds(key_of(model), lambda _: speeds)


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
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as older:
        older.setattr(store, "RATES_METHOD", RATES_METHOD - 1)
        keep_rates(this_machine(), RATES)
    assert kept_rates(this_machine()) == () and not caplog.records


# What is kept of a model.


@given(
    runs=st.lists(
        st.builds(
            OwnRun,
            st.integers(0, 99),
            st.integers(1, 99),
            *[st.floats(1e-6, 1e6)] * 3,
            *[st.floats(0, 1e6).filter(lambda x: x == 0 or x > 1e-6)] * 2,
        ),
        max_size=9,
    )
)
def test_speeds_that_are_kept_come_back(runs: list[OwnRun], folders: dict[str, Path]) -> None:
    key = replace(key_of(opened(folders["qwen3_moe"])), model="/elsewhere")
    keep_speeds(key, lambda _: SPEEDS)
    for run in runs:
        keep_speeds(key, lambda speeds, run=run: speeds.having_run(run))  # type: ignore[misc]
    found = kept_speeds(key)
    assert replace(found, runs=()) == SPEEDS
    newest = {run.num_residents: run for run in runs}
    assert len(found.runs) == min(MAX_RUNS, len(newest))
    assert all(run == newest[run.num_residents] for run in found.runs)
    if runs:
        assert found.runs[0] == runs[-1] == found.run_like(runs[-1].num_residents)
        assert found.run_like(10**6) == runs[-1]
    assert kept_speeds(replace(key, kernels="others")) == ModelSpeeds()


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "[]",
        "{",
        '{"of": 1}',
        ("passes", [[1, -1.0]]),
        ("passes", [[4, 1.0], [1, 1.0]]),
        ("passes", "no"),
        ("reads", [[0, 1.0]]),
        ("reads", [[1, 1.0]] * 99),
        ("rounding_s", "1"),
        ("runs", [{"num_rows": 1}]),
        ("runs", [{**RUN._asdict(), "compute_s": 1e999}]),
        ("runs", [{**RUN._asdict(), "num_passes": 0.5}]),
    ],
    ids=str,
)
def test_a_torn_or_foreign_file_is_as_none(
    damage: str | tuple[str, object], folders: dict[str, Path]
) -> None:
    model = opened(folders["qwen3_moe"])
    keep(model, SPEEDS.having_run(RUN))
    path = key_of(model).path
    if isinstance(damage, tuple):
        name, value = damage
        damage = json.dumps({**json.loads(path.read_text()), name: value})
    path.write_text(damage)
    assert kept_speeds(key_of(model)) == ModelSpeeds()
    found = make_plan(model).prediction
    assert found is not None and found.speed is None
    keep(model, SPEEDS)
    assert kept_speeds(key_of(model)) == SPEEDS


def test_no_more_files_are_kept_than_there_is_room_for(folders: dict[str, Path]) -> None:
    key = key_of(opened(folders["qwen3_moe"]))
    for number in range(MAX_FILES + 3):
        keep_speeds(replace(key, model=str(number)), lambda _: SPEEDS)
    assert len(list(key.path.parent.iterdir())) == MAX_FILES
    assert kept_speeds(replace(key, model=str(MAX_FILES + 2))) == SPEEDS


def test_a_cache_that_cannot_be_written_costs_only_the_keeping(
    folders: dict[str, Path], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("in the way")
    keep(opened(folders["qwen3_moe"]), SPEEDS)
    assert "holds for this run only" in caplog.text


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


def test_before_the_first_load_there_is_a_bound(folders: dict[str, Path]) -> None:
    keep_rates(this_machine(), RATES)
    plan = plan_model(folders["qwen3_moe"], device="cpu")
    found = plan.prediction
    assert found is not None and found.speed is None and found.memory_bytes > 0
    assert found.at_most == pytest.approx(1e9 / found.memory_bytes)
    assert "at most" in outlook(plan) and "first load measures" in outlook(plan)
    assert verdict(plan, ()).startswith("Fits. At most ")
    assert "at most" in plan_line(plan)
    least = plan_model(folders["qwen3_moe"], device="cpu", host_memory=plan.minimum_bytes)
    assert least.prediction is not None and least.prediction.at_most is not None
    assert least.prediction.at_most < found.at_most


def test_the_bound_needs_no_doctor(folders: dict[str, Path]) -> None:
    found = make_plan(opened(folders["qwen3_moe"])).prediction
    assert found is not None and found.at_most is not None and found.at_most > 0


def test_with_all_in_memory_a_pass_takes_what_was_measured(folders: dict[str, Path]) -> None:
    model = opened(folders["qwen3_moe"])
    keep(model, SPEEDS)
    found = make_plan(model).prediction
    assert found is not None and found.pass_time is not None and found.speed is not None
    assert found.num_rows == 1 and found.read_bytes == 0
    assert found.pass_time.likely_s == pytest.approx(0.01)
    assert found.speed.likely == pytest.approx(100)
    assert found.speed.most / found.speed.least == pytest.approx(DOUBT**2)
    assert DOUBT**2 <= 2


def test_absent_experts_take_their_reads(folders: dict[str, Path]) -> None:
    least_bytes = make_plan(opened(folders["qwen3_moe"])).minimum_bytes
    model = opened(folders["qwen3_moe"], host_memory=least_bytes)
    slow = replace(SPEEDS, reads=((1, 1.0), (8, 4.0)))
    keep(model, slow)
    plan = make_plan(model)
    demand = even_demand(model.facts.config.moe_shape, plan, 1)
    assert plan.prediction is not None and plan.prediction.pass_time is not None
    num_layers = model.facts.config.num_moe_layers
    lent = slots_lent(plan, USUAL_TOKENS)
    absent = 1 - (sum(plan.residents_per_layer) + lent) / plan.num_experts
    assert absent > 0
    of_layer = demand.num_run * absent**MISS_POWER / num_layers
    assert slow.reads_s is not None
    lowest, highest = (slow.reads_s.at(round(of_layer + more)) for more in (-0.5, 0.5))
    waited_s = plan.prediction.pass_time.likely_s - 0.01
    assert lowest * 0.9 < waited_s / num_layers < highest * 1.1
    keep(model, replace(SPEEDS, reads=()))  # nothing that it could follow from
    without = make_plan(model).prediction
    assert without is not None and without.speed is None


def test_memory_of_an_unused_context_holds_experts(folders: dict[str, Path]) -> None:
    keep_rates(this_machine(), RATES)
    context = 1 << 16
    least_bytes = make_plan(opened(folders["qwen3_moe"], context=context)).minimum_bytes
    model = opened(folders["qwen3_moe"], host_memory=least_bytes, context=context)
    keep(model, replace(SPEEDS, reads=((1, 1.0), (8, 4.0))))
    plan = make_plan(model)
    assert sum(plan.residents_per_layer) < plan.num_experts < slots_lent(plan, USUAL_TOKENS)
    assert plan.prediction is not None and plan.prediction.pass_time is not None
    assert plan.prediction.pass_time.likely_s == pytest.approx(0.01)
    assert plan.prediction.at_most == pytest.approx(1e9 / plan.prediction.memory_bytes)


@pytest.mark.parametrize(("num_tokens", "lent"), [(0, 12), (100, 6), (200, 0), (999, 0)])
def test_the_cache_lends_what_a_text_leaves(num_tokens: int, lent: int) -> None:
    tier = TierPlan(GIB, 0, 120, 0, 0, 10, 6)
    plan = replace(plan_of(9, (2, 2, 2)), host=tier, context=200, max_cache_tokens=200)
    assert slots_lent(plan, num_tokens) == lent
    assert slots_lent(replace(plan, max_cache_tokens=0), num_tokens) == 0


def test_a_run_alone_predicts_the_next_like_it(folders: dict[str, Path]) -> None:
    """Loads on a busy machine measure nothing; long answers are kept all the same."""
    model = opened(folders["qwen3_moe"])
    plan = make_plan(model)
    run = RUN._replace(num_residents=sum(plan.residents_per_layer))
    for kept, speed in ((run, 1 / 0.015), (run._replace(num_rows=3.0), None), (RUN, None)):
        keep(model, ModelSpeeds(runs=(kept,)))
        found = make_plan(model).prediction
        assert found is not None
        assert (found.speed and found.speed.likely) == (speed and pytest.approx(speed))


@given(compute_s=st.floats(1e-4, 1), wait_s=st.floats(1e-4, 1), num_tokens=st.floats(1, 4))
def test_the_next_run_is_as_the_last_one(
    compute_s: float, wait_s: float, num_tokens: float, folders: dict[str, Path]
) -> None:
    least_bytes = make_plan(opened(folders["qwen3_moe"])).minimum_bytes
    model = opened(folders["qwen3_moe"], host_memory=least_bytes)
    run = OwnRun(0, 99, 1.0, num_tokens, compute_s, wait_s, 3.0)
    keep(model, replace(SPEEDS, reads=((1, 0.1), (8, 0.2)), runs=(run,)))
    found = make_plan(model).prediction
    assert found is not None and found.pass_time is not None
    assert found.tokens_per_pass == num_tokens
    assert found.pass_time.likely_s == pytest.approx(compute_s + wait_s)
    # With everything in memory nothing is waited for.
    whole = opened(folders["qwen3_moe"])
    of_whole = make_plan(whole).prediction
    assert of_whole is not None and of_whole.pass_time is not None
    assert of_whole.pass_time.likely_s == pytest.approx(compute_s)


def passes(*seconds: float, num_rows: int = 1, wait_s: float = 0.0) -> list[TimedPass]:
    return [TimedPass(num_rows, 1, each + wait_s, wait_s, 2) for each in seconds]


def test_a_run_is_the_average_of_its_passes_but_for_prompts() -> None:
    run = own_run.own_run(7, passes(1.0, num_rows=40) + passes(*[0.1] * 20, wait_s=0.3))
    assert run is not None
    assert run == OwnRun(7, 20, 1.0, 1.0, pytest.approx(0.1), pytest.approx(0.3), 2.0)
    assert run.pass_s == pytest.approx(0.4)


@pytest.mark.parametrize(
    "found",
    [
        [],
        passes(*[1.0] * (MIN_PASSES - 1)),
        passes(*[1e-6] * MIN_PASSES),
        passes(*[0.1] * 8, *[0.1 * DISTURBED * 1.1] * 12),  # others used the machine
        [each._replace(num_tokens=0) for each in passes(*[1.0] * 20)],
    ],
    ids=("none", "few", "short", "disturbed", "no tokens"),
)
def test_a_run_that_says_little_is_not_kept(found: list[TimedPass]) -> None:
    assert own_run.own_run(7, found) is None


INT8_ROWS_OF_Q4 = {"format": "q4", "activations": "int8"}


@pytest.mark.parametrize(
    ("model", "rows", "options"),
    [
        ("qwen3_moe", 1, {}),
        ("qwen3_moe", 1, INT8_ROWS_OF_Q4),
        ("llada", None, {}),
        ("demo:diffusion", 32, {}),
    ],
)
def test_a_first_load_measures_and_a_second_does_not(
    model: str,
    rows: int | None,
    options: dict[str, Any],
    folders: dict[str, Path],
    measuring: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(first_passes, "DISTURBED", 1e9)
    place = folders.get(model, Path(model))
    options = {"context": 256, **options}
    with LLM(place, device="cpu", **options) as llm:
        prediction = llm.plan.prediction
        assert prediction is not None and prediction.speed is not None
        counters = llm.stats()
        nothing = ("num_hits", "num_misses", "read_bytes", "forwards", "num_rows")
        assert all(not counters[name] for name in nothing[:2] + nothing[3:])
        first = llm.generate([[5, 6, 7]], max_tokens=8, ignore_eos=True)[0].token_ids
    speeds = kept_speeds(key_for(place, **options))
    assert speeds.passes and (rows is None or speeds.passes[0][0] == rows)

    def twice(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(first_passes, "run_pass", twice)
    with LLM(place, device="cpu", **options) as llm:
        assert llm.generate([[5, 6, 7]], max_tokens=8, ignore_eos=True)[0].token_ids == first
    planned = make_plan(opened(place, **options)).prediction
    assert planned is not None and planned.speed is not None


def key_for(place: Path, **options: object) -> SpeedKey:
    model = opened(place, **options)
    return speed_key(model.speed_facts, model.kernels().name)


def test_a_model_of_the_least_memory_is_measured_too(
    folders: dict[str, Path], measuring: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_passes, "DISTURBED", 1e9)
    place = folders["qwen3_moe"]
    least = make_plan(opened(place)).minimum_bytes
    with LLM(place, device="cpu", policy="lru", host_memory=least) as llm:
        assert llm.plan.prediction is not None and llm.plan.prediction.speed is not None
        before = llm.stats()["read_bytes"]
        few = llm.generate([[5, 6, 7]], max_tokens=8, ignore_eos=True)[0].token_ids
        assert not before < 0
    model = opened(place)
    speeds = kept_speeds(speed_key(model.speed_facts, model.kernels().name))
    assert [count for count, _ in speeds.reads][0] == 1 and len(speeds.reads) == 2
    with LLM(place, device="cpu") as llm:
        assert llm.generate([[5, 6, 7]], max_tokens=8, ignore_eos=True)[0].token_ids == few


def test_what_was_disturbed_is_measured_at_the_next_load(
    folders: dict[str, Path], measuring: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_passes, "DISTURBED", 0.0)
    with LLM(folders["qwen3_moe"], device="cpu") as llm:
        assert llm.plan.prediction is not None and llm.plan.prediction.speed is None
        assert "predicted_tokens_per_s" not in llm.stats()
    monkeypatch.setattr(first_passes, "DISTURBED", 1e9)
    with LLM(folders["qwen3_moe"], device="cpu") as llm:
        assert "predicted_tokens_per_s" in llm.stats()


def test_a_run_is_kept_as_the_model_is_closed(
    folders: dict[str, Path], measuring: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_run, "MIN_RUN_S", 0.0)
    monkeypatch.setattr(own_run, "DISTURBED", 1e9)
    with LLM(folders["qwen3_moe"], device="cpu") as llm:
        llm.generate([[1, 2, 3]], max_tokens=32, ignore_eos=True)
        llm.logits([1, 2, 3])
    model = opened(folders["qwen3_moe"])
    [run] = kept_speeds(speed_key(model.speed_facts, model.kernels().name)).runs
    assert run.num_passes == 31 and run.num_rows == run.num_tokens == 1.0
    assert run.num_missed == run.wait_s == 0.0


def test_the_first_tokens_of_several_answers_are_told_apart(folders: dict[str, Path]) -> None:
    with LLM(folders["qwen3_moe"], device="cpu") as llm:
        params = SamplingParams(n=3, max_tokens=5, ignore_eos=True)
        answer = ask(llm, [1, 2, 3], params, is_raw=True)
    assert answer.num_first == 3 and 0 < answer.first_s < answer.generation_s


def test_there_is_one_prediction_for_a_run(folders: dict[str, Path]) -> None:
    """The prediction before an answer is the one after it, whatever was asked."""
    keep(opened(folders["qwen3_moe"]), SPEEDS)
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
        assert plan_line(llm.plan).endswith(expected)
        answer = Answer([completion], 2.0, first_s=1.0, num_first=1)
        after = answer_line(answer, llm, is_verbose=True)
        assert expected in after and after.count("expected") == 1
        assert answer_line(answer, llm, is_verbose=False) == "4 tokens · 3.0 tokens/s"


def test_counted_rows_are_of_answers(folders: dict[str, Path]) -> None:
    """Others', such as those of `logits`, have many more rows than a token's."""
    with LLM(folders["qwen3_moe"], device="cpu") as llm:
        llm.generate([[1, 2, 3]], max_tokens=8, ignore_eos=True)
        before = llm.stats()
        llm.logits([1, 2, 3] * 40)
        after = llm.stats()
    assert before["num_rows"] == after["num_rows"] == 3 + 7


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


def test_a_bidirectional_pass_has_a_whole_answer(folders: dict[str, Path]) -> None:
    def published(name: str, **options: object) -> tuple[int, float, float]:
        model = opened(folders[name], **options)
        cache_mode, context = model.options.asked.cache_mode, model.memory.context.num_tokens
        return published_pass(model.facts.config.decoding, cache_mode, context)

    assert published("llada", context=300) == (300, 2.0, 2.0)
    assert published("llada", context=300, kv_cache="dual")[0] == 128
    assert published("llada", context=1000)[0] == 256 + 64
    assert published("qwen3_moe") == (1, 1.0, 1.0)


# What is said.

KNOWN = Prediction(1, 1.0, 3e8, 9e8, PassTime(0.05, 0.25, 0.5), 0.1, at_most=30.0)


def test_a_plan_says_what_is_read_how_fast_and_which_budget() -> None:
    plan = replace(plan_of(96, (8, 8)), prediction=KNOWN, advised_bytes=GIB, full_bytes=2 * GIB)
    told = outlook(plan)
    assert "858.3 MiB of weights" in told and "286.1 MiB of them read from disk" in told
    assert "about 4 tokens/s (2 to 20)" in told and "as this model was measured here" in told
    assert "--host-memory auto, now 1.0 GiB" in told and "everything takes 2.0 GiB" in told
    assert "16 of 96 experts in memory (lowtide)" in plan_line(plan)
    assert "about 4 tokens/s (2 to 20) expected" in plan_line(plan)
    held = outlook(replace(plan, advised_bytes=20 * GIB))
    assert "--host-memory 20G, which holds everything" in held


def test_a_prediction_as_json() -> None:
    assert prediction_object(None) is None
    told = prediction_object(KNOWN)
    assert told is not None and told["at_most_tokens_per_s"] == 30.0
    assert told["tokens_per_s"] == {"least": 2.0, "likely": 4.0, "most": 20.0}
    assert json.loads(json.dumps(told)) == told


def test_the_verdict_comes_first() -> None:
    own = FormatPlan("own", 4, 16 / 96, KNOWN.speed)
    q4 = FormatPlan("q4", 1, 1.0, SpeedRange(60.0, 95.4, 120.0))
    plan = replace(plan_of(96, (8, 8)), prediction=KNOWN)
    assert verdict(plan, (own, q4)) == (
        "Runs, with 17% of the experts in memory. About 4 tokens/s (2 to 20). "
        "With --format q4 about 95; it may change answers."
    )
    whole = replace(plan, residents_per_layer=(48, 48))
    assert verdict(whole, ()) == "Fits. About 4 tokens/s (2 to 20)."


def test_a_budget_that_fits_the_machine_but_not_what_is_free_is_a_warning(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "available_memory_bytes", lambda: 1000)
    plan = plan_model(folders["llada"], device="cpu", host_memory="1GiB")
    assert "1000 B are free now" in plan.reason
    assert plan.advised_bytes == 0 and "advised" not in outlook(plan)
