"""LLaDA-MoE with half of its experts in memory: each step reads the other half and nothing else."""

from __future__ import annotations

from pathlib import Path

import every_expert as script
import pytest
from common import every_expert
from common.run import loaded_engine

from lowtide.cli.outlook import outlook
from lowtide.engine.opening.config import EngineConfig
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
    budget = budget_of_share(plan_model(model, context=256), 0.5)
    begun: list[tuple[int, int, int]] = []
    with loaded_engine(str(model), EngineConfig(host_memory=budget, context=256)) as engine:
        experts = engine.experts
        start = experts.host.transfer.start

        def counted(layer: int, expert: int, slot: int) -> Ticket:
            begun.append((layer, expert, slot))
            return start(layer, expert, slot)

        monkeypatch.setattr(experts.host.transfer, "start", counted)
        with engine.executor.in_charge():
            steps = every_expert._steps(engine, 256, 3)
        assert len(steps) == 3
        assert experts.host.stats.num_ahead > 0 and not experts.host.read_ahead
        # Beside what was asked for only guesses within a pass, of which nearly all are right.
        assert len(begun) == experts.stats.num_misses + experts.host.stats.num_wasted
        assert len(begun) <= 1.01 * experts.stats.num_misses


def test_a_row_compares_bytes_and_time_with_what_there_is() -> None:
    half = {"seconds": [2.0, 4.0, 3.0], "read_bytes": [100, 100, 100]}
    whole = {"seconds": [1.0] * 3, "num_asked": [8] * 3}
    asked = {"num_asked": [8] * 3, "num_absent": [4] * 3}
    row = script._row({**half, **asked}, whole, 8, 3, 25, 100 / 1.5e9)
    assert row["over_absent"] == 0.8 and row["over_absent_asked"] == row["asked_of_all"] == 1
    assert row["of_ceiling"] == pytest.approx(0.5)
    assert row["over_larger"] == pytest.approx(2)
    assert script._judged(256, row) == {"reads_the_absent": True, "is_at_the_ceiling": False}
    assert script._judged(257, row) == {"reads_the_absent": True, "is_the_larger": False}


def test_the_plan_says_that_no_cache_helps(model: Path) -> None:
    plan = plan_model(model, context=1024)
    half = plan_model(model, context=1024, host_memory=budget_of_share(plan, 0.5))
    assert half.prediction is not None and half.prediction.asks_for_all
    assert "only a larger budget reads less" in outlook(half)
    assert "every pass asks" not in outlook(plan)
    few = plan_model(model, context=8, host_memory=budget_of_share(plan, 0.5))
    assert few.prediction is not None and not few.prediction.asks_for_all
    assert "every pass asks" not in outlook(few)
