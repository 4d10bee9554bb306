"""Experts' inputs are loaded where experts are rounded, once, and counted where they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lowtide import LLM
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.model import OpenModel, open_model
from lowtide.engine.planning import format_plans
from lowtide.engine.planning.plan import make_plan
from lowtide.files import array_file
from lowtide.lab.calibrate import calibrate
from lowtide.lab.synth import synth
from lowtide.llm import plan_model
from lowtide.plan import MemoryPlan

TOKEN_IDS = np.random.default_rng(0).integers(3, 300, 120).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth("qwen2_moe", "tiny", tmp_path_factory.mktemp("models") / "model", seed=6)


@pytest.fixture(scope="module")
def calibrated(model: Path) -> Path:
    """The calibration of `model` with its experts' inputs."""
    path = model.parent / "c.lowtide"
    with LLM(model, context=256) as llm:
        calibrate(llm, TOKEN_IDS, "m", num_pieces=4, inputs=True).save(path)
    return path


@pytest.fixture
def were_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of arrays of files, as they are read."""
    names: list[str] = []
    read = array_file._read_array

    def keep(file: Any, name: str, dtype: str, size: int) -> Any:
        names.append(name)
        return read(file, name, dtype, size)

    monkeypatch.setattr(array_file, "_read_array", keep)
    return names


@pytest.mark.parametrize("format, num_reads", [("own", 0), ("q4", 1)])
def test_they_are_read_once_and_only_to_round_for(
    model: Path, calibrated: Path, were_read: list[str], format: str, num_reads: int
) -> None:
    LLM(model, context=64, format=format, calibration=str(calibrated)).close()
    assert were_read.count("inputs_hidden") == were_read.count("inputs_activated") == num_reads
    assert were_read.count("trace_ids") == were_read.count("trace_weights") == 1


@pytest.mark.parametrize("format", ["own", "q4"])
def test_each_format_s_plan_is_that_of_a_run_in_it(
    model: Path,
    calibrated: Path,
    were_read: list[str],
    monkeypatch: pytest.MonkeyPatch,
    format: str,
) -> None:
    plans: dict[str | None, MemoryPlan] = {}

    def keep(opened: OpenModel) -> MemoryPlan:
        plans[opened.options.format] = make_plan(opened)
        return plans[opened.options.format]

    monkeypatch.setattr(format_plans, "make_plan", keep)
    options: dict[str, Any] = {"context": 64, "calibration": str(calibrated), "device": "cpu"}
    rows = format_plans.plan_by_format(open_model(model, EngineConfig(**options, format=format)))
    assert [row.format for row in rows] == list(plans) == ["own", "q8", "q4"]
    assert were_read.count("inputs_hidden") == 1
    for name, plan in plans.items():
        alone = plan_model(model, **options, format=name)
        assert (plan.overhead_bytes, plan.formats) == (alone.overhead_bytes, alone.formats)


def test_another_model_s_are_no_format_s(calibrated: Path, tmp_path: Path) -> None:
    other = synth("qwen2_moe", "tiny", tmp_path / "other", seed=7)
    opened = open_model(other, EngineConfig(context=64, calibration=str(calibrated)))
    assert [row.format for row in format_plans.plan_by_format(opened)] == ["own"]
