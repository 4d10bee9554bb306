"""lowtide's side of the benchmarks of long contexts: steps by any plan, and what they take."""

from __future__ import annotations

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
    folder = tmp_path_factory.mktemp("models")

    def make(family: str) -> Path:
        made = folder / family
        return made if made.exists() else synth(family, "tiny", made)

    return make


@pytest.mark.parametrize("form", list(planned_model.HeadForm))
def test_a_planned_step_is_the_published_one_by_any_plan(
    form: Any, tiny: Callable[[str], Path]
) -> None:
    folder = tiny("llada")
    model = planned_model.StepModel(folder, 2, form)
    num_tokens, masked = 800, 400
    undivided = {"mlp": 1, "experts": 1, "attention": 1, "logits": 1}
    plans = [
        model.least_plan(num_tokens, masked),
        model.plan_of(num_tokens, masked, undivided),
        model.plan(num_tokens, masked, 1 << 40),
    ]
    config = read_config_in(folder)
    with torch.inference_mode(), model.loaded() as engine:
        answers = [planned_model.PlannedStep(engine, plan, form).run() for plan in plans]
        token_ids = masked_sides.canvas(config, num_tokens, masked)
        weights = official.read_weights(folder)
        [side] = masked_sides.open_sides(config, weights, ["ported"], 2).values()
        best, probability = (rows[-masked:] for rows in side.step(token_ids))
    for own_best, own_probability in answers:
        assert torch.equal(own_best, answers[0][0])
        assert torch.equal(own_probability, answers[0][1])
    is_same = answers[0][0] == best
    assert is_same.float().mean() > 0.9  # bfloat16: near ties fall either way
    off = (answers[0][1][is_same] - probability[is_same].double()).abs()
    assert off.max() < 0.05
    assert plans[0].needed_bytes <= plans[1].needed_bytes


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
