"""lowtide's side of the benchmarks of long contexts: steps by any plan, and what they take."""

from __future__ import annotations

import gc
import json
import mmap
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import max_context
import planned_memory
import pytest
import step_time
import torch
from common import (
    allocation_trace,
    masked_memory,
    masked_shapes,
    masked_sides,
    masked_trace,
    official,
    planned_model,
    planning_time,
)

from lowtide.errors import PlanError
from lowtide.families import read_config_in
from lowtide.memory.arena import Arena, Region
from lowtide.model_writing.synth import synth

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
    """The declared bytes are torch's own in a planned step on this thread, by its profiler."""
    model = planned_model.StepModel(tiny(family), 2)
    plan = model.least_plan(1600, 800)
    with torch.inference_mode(), model.loaded() as engine:
        step = planned_model.PlannedStep(engine, plan, model.form)
        step.run()  # libraries keep what they compiled
        use = allocation_trace.use_of(allocation_trace.trace(step.run).moments)
    assert plan.library_bytes / 10 <= use.peak_bytes <= plan.library_bytes


@pytest.mark.parametrize("family", ["llada", "llada_moe"])
def test_nothing_holds_a_steps_memory_after_it(family: str, tiny: Callable[[str], Path]) -> None:
    """The second step is measured, from when the first one's memory is gone."""
    model = planned_model.StepModel(tiny(family), 2)
    plan = model.least_plan(1600, 800)
    with torch.inference_mode(), model.loaded() as engine:
        memory = mmap.mmap(-1, plan.placement.arena_bytes)
        found = weakref.ref(memory)
        arena: Any = Region(torch.frombuffer(memory, dtype=torch.uint8))
        del memory
        step = planned_model.PlannedStep(engine, plan, model.form, arena=arena)
        step.run()
        assert found() is not None
        del step, arena
        gc.collect()
        assert found() is None


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


def test_lines_and_plans_have_their_longest_and_a_step_is_held_against_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps take 1,000 bytes and 2,000 for each token.

    lowtide's takes a tenth more than its plan says.
    """

    def measure(line: Any, lengths: list[int]) -> list[dict[str, Any]]:
        return [{"step_bytes": 1000.0 + 2000 * length, "step_s": 1.0} for length in lengths]

    def in_process(name: str, *_: object) -> dict[str, Any]:
        assert name == "masked step"
        return {"step_bytes": 1.1e6, "step_s": 1.0, "planned_bytes": 1e6}

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(max_context.Line, "measure", measure)
    monkeypatch.setattr(max_context, "in_process", in_process)
    [shape] = masked_shapes.masked_shapes(["LLaDA-8B"], "tiny")
    monkeypatch.setattr(max_context, "NARROW", shape)
    monkeypatch.setattr(max_context, "masked_shapes", lambda names: [shape])
    out = tmp_path / "out"
    told = ["--caps", "0.02", "--sides", "ported", "--run", "800", "--out", str(out)]
    told += ["--their-lengths", "100", "200", "400"]
    monkeypatch.setattr(sys, "argv", ["max_context.py", *told])
    max_context.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    [cell] = [row for row in rows if row["what"] == "cell"]
    free_bytes = 20_000_000 - shape.weight_bytes
    assert cell["ported_num_tokens"] == pytest.approx((free_bytes - 1000) / 2000, abs=1)
    over = cell["planned_tokens"] / cell["ported_num_tokens"]
    assert cell["over_ported"] == pytest.approx(over, rel=1e-4)
    offs = {row["side"]: row["off"] for row in rows if row["what"] == "run"}
    assert offs == pytest.approx({"ported": 0.0, "lowtide": 0.1}, abs=1e-9)


def test_the_narrow_model_is_a_llada_whose_step_is_its_logits() -> None:
    narrow = masked_shapes.NARROW
    assert masked_shapes.MaskedShape(**masked_shapes.settings_of(narrow)) == narrow
    assert narrow.cut_bytes(2) < 64 * MIB


def test_rounds_to_warm_up_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first step of so many layers takes 100 s, every later one 1 s."""
    now_s, called = 0.0, list[int]()

    def step(num_layers: int) -> None:
        nonlocal now_s
        now_s += 1.0 if num_layers in called else 100.0
        called.append(num_layers)

    class Step:
        def __init__(self, *_: object, num_layers: int, arena: object) -> None:
            self.run = partial(step, num_layers)

    plan = SimpleNamespace(placement=SimpleNamespace(arena_bytes=64))
    engine = SimpleNamespace(
        model=SimpleNamespace(config=None), facts=SimpleNamespace(folder=tmp_path)
    )
    model = SimpleNamespace(loaded=lambda: nullcontext(engine), plan=lambda *_: plan, form=None)
    shape = SimpleNamespace(name="m", num_layers=8, weight_bytes=0, folder=lambda num_layers: None)
    clock = SimpleNamespace(perf_counter=lambda: now_s)
    for name, stand_in in (
        *(("PlannedStep", Step), ("StepModel", lambda folder: model), ("time", clock)),
        *(("masked_shapes", lambda names: [shape]), ("read_weights", lambda folder: None)),
        *(("open_sides", lambda *_: {}), ("canvas", lambda *_: None), ("memory_ceiling", dict)),
    ):
        monkeypatch.setattr(step_time, name, stand_in)
    out = tmp_path / "out"
    told = ["--parts", "sides", "--lengths", "16", "--shares", "0.5", "--repeats", "3"]
    monkeypatch.setattr(sys, "argv", ["step_time.py", *told, "--out", str(out)])
    step_time.main()
    assert called == [2, 4] * 4
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    [fewest] = [row for row in rows if row.get("depth") == "2 layers"]
    assert fewest["each_step_s"] == [1.0] * 3
