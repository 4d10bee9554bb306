"""lowtide's side of the benchmarks of long contexts: steps by any plan, and what they take."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.errors import PlanError
from lowtide.families import read_config_in
from lowtide.lab.synth import synth
from lowtide.memory.arena import Arena

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
(
    allocation_trace,
    masked_memory,
    masked_shapes,
    masked_sides,
    masked_trace,
    official,
    planned_model,
    planning_time,
    max_context,
    planned_memory,
) = map(
    import_module,
    (
        "common.allocation_trace",
        "common.masked_memory",
        "common.masked_shapes",
        "common.masked_sides",
        "common.masked_trace",
        "common.official",
        "common.planned_model",
        "common.planning_time",
        "max_context",
        "planned_memory",
    ),
)

MIB = 1 << 20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Models that are computed in float32, so that two ways to compute one step are near."""
    folder = tmp_path_factory.mktemp("models")

    def make(family: str) -> Path:
        made = folder / family
        if not made.exists():
            path = synth(family, "tiny", made) / "config.json"
            config = json.loads(path.read_text(encoding="utf-8"))
            path.write_text(json.dumps({**config, "torch_dtype": "float32"}), encoding="utf-8")
        return made

    return make


@pytest.mark.parametrize("family", ["llada", "llada_moe", "dream"])
@pytest.mark.parametrize("form", list(planned_model.HeadForm))
def test_a_planned_step_is_the_published_one_by_any_plan(
    form: Any, family: str, tiny: Callable[[str], Path]
) -> None:
    folder = tiny(family)
    model = planned_model.StepModel(folder, 2, form)
    num_tokens, masked = 800, 400
    plans = [
        model.least_plan(num_tokens, masked),
        model.plan_of(num_tokens, masked, planned_model.UNDIVIDED),
        model.plan(num_tokens, masked, 1 << 40),
    ]
    config = read_config_in(folder)
    with torch.inference_mode(), model.loaded() as engine:
        answers = [planned_model.PlannedStep(engine, plan, form).run() for plan in plans]
        token_ids = masked_sides.canvas(config, num_tokens, masked)
        weights = {name: one.float() for name, one in official.read_weights(folder).items()}
        [side] = masked_sides.open_sides(config, weights, ["ported"], 2).values()
        best, probability = (rows[-masked:] for rows in side.step(token_ids))
    for own_best, own_probability in answers:
        assert torch.equal(own_best, answers[0][0])
        assert torch.equal(own_probability, answers[0][1])
    assert torch.equal(answers[0][0], best)
    torch.testing.assert_close(answers[0][1], probability.double(), rtol=1e-3, atol=1e-5)
    assert plans[0].needed_bytes <= plans[1].needed_bytes


@pytest.mark.parametrize("family", ["llada", "llada_moe", "dream"])
def test_libraries_allocate_what_was_declared(family: str, tiny: Callable[[str], Path]) -> None:
    """What torch itself allocates in a planned step on this thread, as its profiler sees it."""
    model = planned_model.StepModel(tiny(family), 2)
    plan = model.least_plan(1600, 800)
    with torch.inference_mode(), model.loaded() as engine:
        step = planned_model.PlannedStep(engine, plan, model.form)
        step.run()  # libraries keep what they compiled
        use = allocation_trace.use_of(allocation_trace.trace(step.run).moments)
    assert plan.library_bytes / 10 <= use.peak_bytes <= plan.library_bytes


def test_the_longest_sequence_is_the_last_that_has_a_plan(tiny: Callable[[str], Path]) -> None:
    model = planned_model.StepModel(tiny("dream"))
    free_bytes = 20 * MIB
    longest = model.longest(free_bytes, lambda num_tokens: num_tokens // 2, 1 << 20)
    assert model.plan(longest, longest // 2, free_bytes).needed_bytes <= free_bytes
    with pytest.raises(PlanError):
        model.plan(longest + 16, (longest + 16) // 2, free_bytes)
    found = planning_time.compare_search(model, 1600)
    assert found["longest"] == found["brute_force_longest"] >= 1600
    request = planning_time.plan_request(model, 1600, 400, free_bytes)
    assert 1 < request["num_plans"] <= 16


@pytest.mark.parametrize("form", list(planned_model.HeadForm))
def test_the_longest_undivided_sequence_needs_no_weights(form: Any, tmp_path: Path) -> None:
    """Planned of a config.json alone, for an ablation of Mosaic's parts."""
    [shape] = masked_shapes.masked_shapes(["LLaDA-MoE"], "tiny")
    model = planned_model.StepModel(shape.config_alone(2, tmp_path), form=form)

    def needed_bytes(num_tokens: int) -> int:
        return model.plan_of(num_tokens, num_tokens // 2, planned_model.UNDIVIDED).needed_bytes

    longest = model.longest_whole(20 * MIB, lambda num_tokens: num_tokens // 2, 1 << 20)
    assert needed_bytes(longest) <= 20 * MIB < needed_bytes(longest + 1)
    assert longest < model.longest(20 * MIB, lambda num_tokens: num_tokens // 2, 1 << 20)
    assert model.longest_whole(MIB, lambda num_tokens: num_tokens, 1 << 20) == 0


def test_a_step_is_run_only_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    [shape] = masked_shapes.masked_shapes(["LLaDA-8B"], "tiny")
    line = max_context.Line(shape, "ported", 0.5)
    for num_tokens in (1000, 2000, 4000):
        line.step_bytes[num_tokens] = 1e6 * num_tokens
        line.step_s[num_tokens] = 1e-3 * num_tokens
    monkeypatch.setattr(max_context, "available_memory_bytes", lambda: 12 << 30)
    assert line.can_run(10_000, 11.0)
    assert not line.can_run(10_000, 9.0) and not line.can_run(12_000, 1e3)


def test_a_plan_is_kept_within_a_percent_or_32_mib() -> None:
    assert planned_memory.is_as_planned(100 * MIB, 131 * MIB)
    assert not planned_memory.is_as_planned(100 * MIB, 133 * MIB)
    assert planned_memory.is_as_planned(10_000 * MIB, 10_099 * MIB)


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="Linux's page map")
def test_pages_that_were_touched_are_resident() -> None:
    arena = Arena(8 * MIB, grows_slowly=True)
    address = arena.bytes.data_ptr()
    assert masked_memory.resident_within(address, 8 * MIB) == 0
    arena.bytes[: 3 * MIB].fill_(1)
    assert masked_memory.resident_within(address, 8 * MIB) == 3 * MIB


def test_a_workspace_notes_what_is_alive_when() -> None:
    moments: list[allocation_trace.Moment] = []
    workspace = masked_trace.TimedWorkspace(moments, torch.zeros(1 << 12, dtype=torch.uint8))
    with workspace.scope():
        one = workspace.take("one", (64,), torch.uint8)
        workspace.take("two", (128,), torch.uint8)
        workspace.give_back(one)
    assert [moment.live_bytes for moment in moments] == [0, 64, 192, 128, 0]
