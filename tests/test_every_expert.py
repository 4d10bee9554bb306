"""LLaDA-MoE with half of its experts in memory: each step reads the other half and nothing else."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import every_expert as script
import pytest
from common import every_expert
from common.run import loaded_engine

from lowtide.cli.outlook import outlook
from lowtide.engine.running.engine import Engine
from lowtide.lab.budgets import budget_of_share
from lowtide.llm import plan_model
from lowtide.model_writing.synth import synth
from lowtide.reading.file_reader import Ticket

LENGTHS = [256, 640]  # of one tile, and of several


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth("llada_moe", "tiny", tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("policy", ["auto", "buddymoe"])
def test_a_step_reads_the_absent_half_to_the_byte(model: Path, policy: str) -> None:
    plan = plan_model(model, context=max(LENGTHS))
    found = every_expert.measure(
        {
            "model": str(model),
            "budget_bytes": budget_of_share(plan, 0.5),
            "context": max(LENGTHS),
            "policy": policy,
            "policy_options": {"miss": "wait"} if policy == "buddymoe" else {},
            "lengths": LENGTHS,
            "num_steps": 3,
        }
    )
    assert found["peak_resident_bytes"] > 0
    num_absent = found["num_experts"] - found["num_residents"]
    # Half but for what operators that are divided leave to slots.
    assert found["num_experts"] * 3 // 8 <= num_absent <= found["num_experts"] // 2
    for steps in found["steps"].values():
        assert len(steps["read_bytes"]) == 3
        for read_bytes, asked, absent in zip(
            steps["read_bytes"], steps["num_asked"], steps["num_absent"], strict=True
        ):
            assert read_bytes == absent * plan.host.slot_bytes
            # At most the absent half, and that within 1% where the step asks for everything.
            assert num_absent - (found["num_experts"] - asked) <= absent <= num_absent


def test_an_answer_reads_the_absent_half_once_a_step(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted where reads begin: none is begun for a step that does not come."""
    begun: list[tuple[int, int, int]] = []

    @contextmanager
    def watched(*arguments: Any) -> Iterator[Engine]:
        with loaded_engine(*arguments) as engine:
            experts = engine.experts
            start = experts.host.transfer.start

            def counted(layer: int, expert: int, slot: int) -> Ticket:
                begun.append((layer, expert, slot))
                return start(layer, expert, slot)

            monkeypatch.setattr(experts.host.transfer, "start", counted)
            yield engine
            assert experts.host.stats.num_ahead > 0 and not experts.host.read_ahead
            # Beside what was asked for only guesses within a pass, of which nearly all are right.
            assert len(begun) == experts.stats.num_misses + experts.host.stats.num_wasted
            assert len(begun) <= 1.01 * experts.stats.num_misses

    monkeypatch.setattr(every_expert, "loaded_engine", watched)
    found = every_expert.measure(
        {
            "model": str(model),
            "budget_bytes": budget_of_share(plan_model(model, context=256), 0.5),
            "context": 256,
            "policy": "auto",
            "lengths": [256],
            "num_steps": 3,
        }
    )
    assert begun and len(found["steps"]["256"]["seconds"]) == 3


def test_a_row_compares_bytes_and_time_with_what_there_is(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot_bytes = plan_model(model, context=257).host.slot_bytes
    full_bytes = plan_model(model, context=257).full_bytes
    asked = {"num_asked": [8] * 3, "num_absent": [4] * 3}
    half = {"seconds": [2.0, 4.0, 3.0], "read_bytes": [4 * slot_bytes] * 3, **asked}
    whole = {"seconds": [1.0] * 3, "num_asked": [8] * 3}

    def in_process(name: str, task: dict[str, Any], *_: object) -> dict[str, Any]:
        steps = whole if task["budget_bytes"] == full_bytes else half
        return {
            "steps": dict.fromkeys(("256", "257"), steps),
            "num_experts": 8,
            "num_residents": 3,
            "peak_resident_bytes": 1,
            "allowed_bytes": 1,
        }

    ceiling = {"random_read_GBps": 4 * slot_bytes / 1.5e9}
    disk = SimpleNamespace(measure=lambda: ceiling)
    shape = SimpleNamespace(folder=lambda num_layers: model)
    monkeypatch.setattr(script, "in_process", in_process)
    monkeypatch.setattr(script, "Disk", lambda *_: disk)
    monkeypatch.setattr(script, "masked_shapes", lambda names: [shape])
    out = tmp_path / "out"
    told = ["every_expert.py", "--lengths", "256", "257", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", told)
    script.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    short, long = (row for row in rows if row["what"] == "half of the experts")
    for row in (short, long):
        assert row["over_absent"] == 0.8 and row["over_absent_asked"] == row["asked_of_all"] == 1
        assert row["of_ceiling"] == pytest.approx(0.5) and row["over_larger"] == pytest.approx(2)
        assert row["reads_the_absent"] and row["is_within_budget"]
    assert short["is_at_the_ceiling"] is False and "is_the_larger" not in short
    assert long["is_the_larger"] is False and "is_at_the_ceiling" not in long


def test_the_plan_says_that_no_cache_helps(model: Path) -> None:
    plan = plan_model(model, context=1024)
    half = plan_model(model, context=1024, host_memory=budget_of_share(plan, 0.5))
    assert half.prediction is not None and half.prediction.asks_for_all
    assert "only a larger budget reads less" in outlook(half)
    assert "every pass asks" not in outlook(plan)
    few = plan_model(model, context=8, host_memory=budget_of_share(plan, 0.5))
    assert few.prediction is not None and not few.prediction.asks_for_all
    assert "every pass asks" not in outlook(few)
