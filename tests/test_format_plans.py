"""A plan's table by format: what q8 and q4 would give within the same budget."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

from lowtide import SamplingParams
from lowtide.answers import opening
from lowtide.cli.app import app
from lowtide.engine.opening import model as engine_opening
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.planning import one_expert
from lowtide.engine.planning.planner import Planner
from lowtide.engine.planning.prediction import known_speeds
from lowtide.errors import UsageError
from lowtide.families import families
from lowtide.kernels.choice import choose_pack
from lowtide.kernels.stored import unpacking_bytes
from lowtide.lab.verbs.quality import parse_settings
from lowtide.llm import LLM, check_request, plan_in_full, plan_model
from lowtide.model_folder import hub
from lowtide.model_writing.pack import pack
from lowtide.model_writing.synth import synth
from lowtide.plan import FormatPlan, SpeedRange, WeightFormats, faster_format


def speed(likely: float) -> SpeedRange:
    return SpeedRange(likely / 2, likely, 2 * likely)


OWN = FormatPlan("own", 4000, 0.25, speed(10.0))
Q8 = FormatPlan("q8", 2000, 0.5, speed(18.0))
Q4 = FormatPlan("q4", 1000, 1.0, speed(40.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth("qwen3_moe", "tiny", tmp_path_factory.mktemp("formats") / "model")


def test_the_rows_are_the_plans_in_those_formats(folder: Path) -> None:
    whole = plan_model(folder, context=64)
    budget = whole.minimum_bytes + (whole.full_bytes - whole.minimum_bytes) // 3
    found = plan_in_full(folder, context=64, host_memory=budget)
    assert [row.format for row in found.by_format] == ["own", "q8", "q4"]
    for row in found.by_format:
        plan = plan_model(folder, context=64, host_memory=budget, format=row.format)
        assert row.resident_share == sum(plan.residents_per_layer) / plan.num_experts
        assert plan.prediction is not None and row.speed == plan.prediction.speed
        held = plan.host.dense_bytes + plan.num_experts * plan.host.slot_bytes
        assert row.weight_bytes == held
    shares = [row.resident_share for row in found.by_format]
    assert shares == sorted(shares) and shares[0] < shares[2]


def test_what_threads_unpack_weights_into_is_outside_the_budget(tmp_path: Path) -> None:
    config = families()["mixtral"].sizes()["full"].config
    (tmp_path / "config.json").write_text(json.dumps(config))
    # The process' own memory is in both, and only grows.
    rounded, own = (
        plan_model(tmp_path, context=64, format=name).overhead_bytes for name in ("q4", "own")
    )
    assert (
        rounded - own > unpacking_bytes((config["intermediate_size"], config["hidden_size"])) // 2
    )


def test_a_format_that_weights_are_stored_in_is_no_row_of_its_own(
    folder: Path, tmp_path: Path
) -> None:
    packed = pack(folder, tmp_path / "packed", format="q4")
    assert [row.format for row in plan_in_full(packed, context=64).by_format] == ["own"]


def test_a_plan_ends_with_the_table_and_begins_with_what_is_faster(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # rates that are kept there decide, too
    budget = str(plan_model(folder, context=64).minimum_bytes)
    given = ["plan", str(folder), "--context", "64", "--host-memory", budget]
    result = CliRunner().invoke(app, given, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Runs, with ") and "With --format q" in result.stdout
    assert "by format" in result.stdout and "expected tokens/s" in result.stdout
    plan = json.loads(CliRunner().invoke(app, [*given, "--json"]).stdout)
    assert [row["format"] for row in plan["by_format"]] == ["own", "q8", "q4"]
    assert plan["faster_format"] in ("q8", "q4")


@pytest.mark.parametrize(
    ("rows", "weights", "name"),
    [
        ((OWN, Q8, Q4), WeightFormats(), "q4"),
        ((OWN, Q8), WeightFormats(), "q8"),
        ((OWN, FormatPlan("q8", 2, 0.5, speed(11.9))), None, None),
        ((FormatPlan("own", 4, 1.0, speed(10.0)), Q4), WeightFormats(), None),
        ((OWN, Q8, Q4), WeightFormats(experts="q4"), None),
        ((OWN,), WeightFormats(), None),
        ((FormatPlan("own", 4, None, None), FormatPlan("q4", 1, 0.5, None)), None, "q4"),
        ((FormatPlan("own", 4, 0.2, None), FormatPlan("q4", 1, 0.2, None)), None, None),
    ],
)
def test_the_faster_format_is_one_of_a_slow_plan(
    rows: tuple[FormatPlan, ...], weights: WeightFormats | None, name: str | None
) -> None:
    found = faster_format(rows, weights or WeightFormats())
    assert (None if found is None else found.format) == name


def test_auto_is_what_the_first_line_names(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(one_expert, "perf_counter", lambda: 0.0)  # rounding takes no time
    least = plan_model(folder, context=64).minimum_bytes
    options: dict[str, Any] = {"context": 64, "host_memory": least}
    named = faster_format(plan_in_full(folder, **options).by_format, WeightFormats())
    chosen = plan_in_full(folder, format="auto", **options)
    assert chosen.memory == plan_model(folder, format=named.format, **options)
    assert [row.format for row in chosen.by_format] == ["own", "q8", "q4"]
    prompt = list(range(2, 20))
    words = []
    for name in ("auto", named.format):
        with LLM(folder, format=name, kernels="reference", **options) as llm:
            assert not llm.plan.formats.is_own
            words.append(llm.generate([prompt], max_tokens=8, progress=False)[0].token_ids)
    assert words[0] == words[1]


def test_passes_are_counted_once_for_all_formats(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, num_counted = Planner.run_forward, 0

    def counted(self: Planner, *arguments: Any, **more: Any) -> Any:
        nonlocal num_counted
        num_counted += 1
        return forward(self, *arguments, **more)

    monkeypatch.setattr(Planner, "run_forward", counted)
    plan_model(folder, context=64)
    num_alone, num_counted = num_counted, 0
    assert len(plan_in_full(folder, context=64).by_format) == 3
    assert num_counted == num_alone > 0


def test_auto_leaves_what_takes_long_to_round(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expert's rounding is timed beside its read, once, before the format is chosen."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chosen, now_s = list[str](), 0.0

    def choose_slow(kernels: str) -> Callable[..., None]:
        chosen.append(kernels)
        packs = choose_pack(kernels)

        def slow(*arguments: Any) -> None:
            nonlocal now_s
            now_s += 1.0
            packs(*arguments)

        return slow

    monkeypatch.setattr(one_expert, "choose_pack", choose_slow)
    monkeypatch.setattr(one_expert, "perf_counter", lambda: now_s)
    least = plan_model(folder, context=64).minimum_bytes
    for _ in range(2):
        plan = plan_model(folder, context=64, host_memory=least, format="auto")
        assert plan.formats.is_own and len(chosen) == 2  # once for q8, once for q4


def test_an_expert_is_timed_as_it_is_read_and_rounded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own, q4 = (opening.opened_model(folder, {"format": name}) for name in ("own", "q4"))
    one_expert.keep_rounding(own.facts.checkpoint, own.memory, q4.speed_facts)
    found = known_speeds(q4.speed_facts).rounding_s
    assert found is not None and found > 0 and known_speeds(own.speed_facts).rounding_s is None


def test_auto_leaves_what_fits_as_it_is_stored(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = pack(folder, tmp_path / "packed", format="q4")
    check_request(folder, lambda _: [1], SamplingParams(), context=64, format="auto")
    opens, opened = opening.open_for_plan, list[object]()
    monkeypatch.setattr(opening, "open_for_plan", lambda *a: opened.append(a) or opens(*a))
    assert plan_model(folder, context=64).formats.is_own, "never the default"
    for each in (folder, packed):
        own = plan_model(each, context=64)
        opened.clear()
        assert plan_model(each, context=64, format="auto") == own
        assert len(opened) == 1, "what is as it is stored is not opened again"


def test_auto_is_refused_where_a_format_has_to_be_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'auto' chooses for all parts"):
        plan_model(folder, format="auto", dense_dtype="q4")
    for given in (["verify"], ["bench"], ["pack", "--out", str(tmp_path / "out")]):
        result = CliRunner().invoke(app, [given[0], str(folder), *given[1:], "--format", "auto"])
        assert result.exit_code == 2 and "name the format here" in " ".join(result.output.split())
    with pytest.raises(UsageError, match="name the format here"):
        parse_settings(["policy=lru format=own format=auto"])


def test_auto_does_not_round_rows(folder: Path) -> None:
    """Where weights stay as they are stored there would be none to multiply such rows with."""
    with pytest.raises(UsageError, match="'int8' needs weights in a format that is named"):
        plan_model(folder, format="auto", activations="int8")


@pytest.mark.parametrize("verb", ["verify", "bench", "quality"])
def test_auto_is_refused_before_weights_are_fetched(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("import os")

    def fetched(*_: object, **__: object) -> NoReturn:
        raise AssertionError("looked for the model")

    monkeypatch.setattr(hub, "locate_model", fetched)
    monkeypatch.setattr(engine_opening, "resolve_model", fetched)
    more = ["--text", str(text)] if verb == "quality" else []
    result = CliRunner().invoke(app, [verb, "org/name", "--format", "auto", *more])
    assert result.exit_code == 2 and "name the format here" in " ".join(result.output.split())
    with pytest.raises(UsageError, match="name the format here"):
        engine_opening.open_model("org/name", EngineConfig(format="auto"))
