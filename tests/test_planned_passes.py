"""Bidirectional models' passes in `plan`: the longest context, chunks, pictures."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from poison import PoisonedWorkspace
from rich.console import Console
from typer.testing import CliRunner
from whole import planner_of

from lowtide import LLM, DiffusionParams, SamplingParams
from lowtide.cli import plotting
from lowtide.cli.app import app
from lowtide.cli.live import LiveView
from lowtide.cli.passes import pass_caption
from lowtide.cli.passes_picture import draw, parts
from lowtide.cli.plotting import check_plot
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.model import OpenModel, open_model
from lowtide.engine.planning.passes import (
    MASKED_SHARES,
    PlannedPasses,
    longest_context,
    plan_passes,
)
from lowtide.engine.planning.plan import make_plan
from lowtide.engine.running import pass_room
from lowtide.errors import PlanError, UnsupportedError
from lowtide.memory.pass_planner import PassPlan
from lowtide.model_writing.synth import synth
from lowtide.plan import MemoryPlan

FAMILIES = ("llada", "llada_moe", "dream")
CONTEXT = 3000
MIB = 1 << 20


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OpenModel]:
    place = tmp_path_factory.mktemp("models")
    return {family: opened(synth(family, "tiny", place / family)) for family in FAMILIES}


def opened(folder: Path, **options: object) -> OpenModel:
    given = {"device": "cpu", "context": CONTEXT, **options}
    return open_model(str(folder), EngineConfig(**given))


def with_budget(model: OpenModel, num_bytes: int, context: int = CONTEXT) -> OpenModel:
    return opened(model.facts.folder, host_memory=num_bytes, context=context)


def longest_within(model: OpenModel, num_bytes: int) -> int:
    return longest_context(planner_of(model), "auto", num_bytes)


def passes_of(model: OpenModel, plan: MemoryPlan) -> PlannedPasses:
    return plan_passes(planner_of(model), plan, "auto", model.options.asked.host_memory)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_bytes", [1 << 21, 5 * MIB, 24 * MIB])
def test_the_longest_context_is_planned_and_the_next_refused(
    models: dict[str, OpenModel], family: str, num_bytes: int
) -> None:
    model = models[family]
    longest = longest_within(model, num_bytes)
    if longest:
        make_plan(with_budget(model, num_bytes, longest))
    with pytest.raises(PlanError):
        make_plan(with_budget(model, num_bytes, longest + 1))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rule", ["low_confidence", "entropy", "topk_margin"])
def test_the_longest_context_runs(
    models: dict[str, OpenModel], family: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, as one answer, and half of it with guidance; NaN wherever nothing is alive."""
    monkeypatch.setattr(pass_room, "Workspace", PoisonedWorkspace)
    model = models[family]
    num_bytes = make_plan(with_budget(model, 64 * MIB, 810)).minimum_bytes
    longest = longest_within(model, num_bytes)
    assert longest >= 810
    with LLM(model.facts.folder, device="cpu", context=longest, host_memory=num_bytes) as llm:
        for cfg_scale, num_tokens in ((0.0, longest), (1.0, longest // 32 * 16)):
            wishes = {"remasking": rule, "cfg_scale": cfg_scale, "steps": 2, "block_length": 700}
            asked = {"max_tokens": 700, "ignore_eos": True}
            if cfg_scale:
                asked["max_tokens"] = wishes["block_length"] = num_tokens - 10
            params = SamplingParams(**asked, diffusion=DiffusionParams(**wishes))
            [answer] = llm.generate([[7] * (num_tokens - params.most_tokens)], params)
            assert len(answer.token_ids) == params.most_tokens
            with pytest.raises(PlanError):
                llm.generate([[7] * (num_tokens + 1 - params.most_tokens)], params)
            current = llm.current_pass
            assert current.needed_bytes <= llm.plan.host.workspace_bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_passes_are_told_as_an_answer_will_have_them(
    models: dict[str, OpenModel], family: str
) -> None:
    """Its masks, its rule and its guidance: the first pass is planned as the first row says."""
    model = models[family]
    num_bytes = make_plan(with_budget(model, 64 * MIB)).minimum_bytes
    diffusion = DiffusionParams(remasking="entropy", cfg_scale=0.5, steps=1, block_length=100)
    params = SamplingParams(max_tokens=100, ignore_eos=True, diffusion=diffusion)
    with LLM(model.facts.folder, device="cpu", context=CONTEXT, host_memory=num_bytes) as llm:
        llm.generate([[7] * 1300], params)
        current, told = llm.current_pass, llm.planned_passes(1400, params)
        assert llm.planned_passes(1400)[0].num_masked == 1400
    assert current is not None and current.counts.asked[0].is_guided
    assert (told[0].num_tokens, told[0].num_masked) == (2800, 100)
    assert [step.num_masked for step in told] == [100, 75, 50, 25, 10]
    assert told[0].needed_bytes == current.needed_bytes
    assert told[0].chunks.items() <= current.chunks.items()


@pytest.mark.parametrize("family", FAMILIES)
def test_fewer_masks_never_divide_more(models: dict[str, OpenModel], family: str) -> None:
    model = models[family]
    least = make_plan(model).minimum_bytes
    plan = make_plan(with_budget(model, least))
    passes = passes_of(with_budget(model, least), plan)
    assert len(passes.steps) == len(MASKED_SHARES)
    assert any(step.is_divided for step in passes.steps)
    for more, fewer in zip(passes.steps, passes.steps[1:], strict=False):
        assert more.num_masked > fewer.num_masked
        assert fewer.chunks["logits"] <= more.chunks["logits"]
    for step in passes.steps:
        assert step.needed_bytes <= plan.host.workspace_bytes
        assert sum(num_bytes for _, num_bytes in step.held) == step.needed_bytes
        assert ("experts" in step.chunks) == (model.facts.config.experts is not None)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("context", [1, 7, 64, 333, 511])
def test_the_passes_of_a_short_context_fit_into_its_plan(
    models: dict[str, OpenModel], family: str, context: int
) -> None:
    model = opened(models[family].facts.folder, context=context)
    plan = make_plan(with_budget(model, make_plan(model).minimum_bytes, context))
    for step in passes_of(model, plan).steps:
        assert step.num_tokens == context and not step.is_divided
        assert 0 < step.needed_bytes <= plan.host.workspace_bytes


def test_the_command_line_answers_in_a_short_context(tmp_path: Path) -> None:
    model = str(synth("llada", "tiny", tmp_path / "model"))
    ids = ["--prompt-ids", "5 17 3", "--context", "200", "--max-tokens", "8"]
    for words in (["plan", model, "--context", "200"], ["generate", model, *ids]):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output


def test_what_is_said_is_what_runs(models: dict[str, OpenModel]) -> None:
    model = models["llada"]
    with LLM(model.facts.folder, device="cpu", host_memory="4M", context=1200) as llm:
        assert llm.current_pass is None
        prompt = [3] * 1100
        llm.generate([prompt], SamplingParams(max_tokens=64))
        current, told = llm.current_pass, llm.planned_passes(1164)
    assert isinstance(current, PassPlan)
    assert current.counts.tokens == 1164 and told[0].num_tokens == 1164
    assert "masked" in pass_caption(dataclasses.replace(current, chunks={"mlp": 3}))
    assert pass_caption(dataclasses.replace(current, chunks={"mlp": 1})) == ""
    assert pass_caption(None) == ""


def test_a_live_view_has_the_pass_below_it() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with LiveView(console, None, 0, caption=lambda: "12 masked: mlp 3") as view:
        view.draft(0, [5, 6], [False, True])
    assert isinstance(console.file, io.StringIO)
    assert "12 masked: mlp 3" in console.file.getvalue()


# The command.


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_plan_tells_chunks_what_binds_and_the_longest_context(
    models: dict[str, OpenModel], tmp_path: Path
) -> None:
    folder, picture = str(models["llada"].facts.folder), tmp_path / "passes.svg"
    arguments = (folder, "--memory", "8M", "--context", str(CONTEXT))
    text = run(*arguments, "--plot", str(picture))
    for said in ("passes over 3000 tokens", "3000 (100%)", "300 (10%)", "logits chunks", "binds"):
        assert said in text
    assert "longest context in 8.0 MiB: " in text and "was made for 1024" in text
    assert "3000 masked" in picture.read_text()
    told = json.loads(run(*arguments, "--json"))["passes"]
    assert f"{told['longest_context']} tokens" in text
    assert [step["num_masked"] for step in told["steps"]] == [3000, 2250, 1500, 750, 300]


def test_a_refusal_names_the_longest_context(models: dict[str, OpenModel]) -> None:
    folder = str(models["llada"].facts.folder)
    result = CliRunner().invoke(app, ["plan", folder, "--memory", "3M", "--context", "9000"])
    assert result.exit_code == 1 and "The longest context in it is " in result.stderr


def test_an_approximate_cache_has_no_longest_context(models: dict[str, OpenModel]) -> None:
    assert "known only without --kv-cache" in run(
        str(models["llada"].facts.folder), "--kv-cache", "dual"
    )


def test_other_models_have_no_picture_of_passes(tmp_path: Path) -> None:
    arguments = ["plan", "demo:chat", "--plot", str(tmp_path / "a.svg")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and "bidirectional" in result.stderr


# Pictures.


def test_a_picture_is_whole_and_its_bars_are_the_peaks(
    models: dict[str, OpenModel], tmp_path: Path
) -> None:
    model = models["llada_moe"]
    passes = passes_of(model, make_plan(model))
    sizes = parts(passes.steps).values()
    for bar, step in zip(zip(*sizes, strict=True), passes.steps, strict=True):
        assert sum(bar) == step.needed_bytes
    for name in ("passes.svg", "passes.pdf", "passes.png", "new/folder/passes.svg"):
        draw(passes, "m", tmp_path / name)
        assert (tmp_path / name).stat().st_size > 500


def test_where_nothing_can_be_drawn_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedError, match=r"\.png, \.svg, \.pdf"):
        check_plot(tmp_path / "passes.gif")
    monkeypatch.setattr(plotting, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="matplotlib"):
        check_plot(tmp_path / "passes.svg")
