"""Host slots beside a device: memory that the system lacks leaves them, and comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from inside import loop_of
from test_moving_memory import model as model  # a fixture
from test_paged_arena import physical_bytes

from lowtide import LLM, SamplingParams
from lowtide.core import align_up
from lowtide.engine.running.engine import Engine
from lowtide.experts.account import account_of, account_rows
from lowtide.hardware.memory import available_memory_bytes
from lowtide.lab.budgets import home_of_share
from lowtide.llm import plan_model
from lowtide.plan import MemoryPlan
from lowtide.policies.catalogue import CATALOGUE
from lowtide.policies.presets import substitutes

PROMPTS = [[(7 * i + n) % 90 for i in range(n)] for n in (9, 120, 40)]
FAST = {"link_GBps": "1000", "link_latency_us": "0", "host_slowdown": "1"}
EMULATED: dict[str, Any] = {"device": "emulated", "device_options": FAST, "context": 512}


@pytest.fixture(scope="module")
def words(model: Path) -> list[list[int]]:
    with LLM(model, context=512) as llm:
        return answers(llm)


def answers(llm: LLM) -> list[list[int]]:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    return [completion.token_ids for completion in llm.generate(PROMPTS, params)]


class System:
    """What this process may still have of the machine's memory, as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free_bytes = 1 << 40
        module = "lowtide.engine.running.moving_slots"
        monkeypatch.setattr(f"{module}.available_memory_bytes", lambda: self.free_bytes)
        monkeypatch.setattr(f"{module}.LOOK_S", 0.0)


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> System:
    return System(monkeypatch)


def num_staging(plan: MemoryPlan) -> int:
    return plan.host.num_slots - sum(plan.host_residents_per_layer)


def check_home(llm: LLM, num_slots: int) -> None:
    """So many slots have memory, no other byte of theirs is physical, and the ledger is whole."""

    def look(engine: Engine) -> None:
        assert engine.home is not None
        slots = engine.home.slots
        host = engine.experts.host
        with engine.home.at_rest():
            host.ledger.check_integrity()
        assert slots.num_live == num_slots == host.ledger.num_slots
        held_bytes = align_up(num_slots * host.slots.layout.num_bytes, slots.arena.group_bytes)
        assert physical_bytes(slots.arena) == held_bytes == engine.home.held_bytes
        assert host.ledger.num_resident <= num_slots - num_staging(engine.plan)

    loop_of(llm).look(look)


@pytest.mark.parametrize("gpu_share", [0.0, 0.3])
def test_host_slots_go_to_a_system_that_runs_short_and_come_back(
    model: Path, words: list[list[int]], system: System, gpu_share: float
) -> None:
    plan = plan_model(model, **EMULATED)
    limits = {
        "host_memory": home_of_share(plan, 0.5),
        "gpu_memory": plan.minimum_bytes + int(gpu_share * (plan.full_bytes - plan.minimum_bytes)),
    }
    with LLM(model, policy="lowtide", **limits, **EMULATED) as llm:
        num_planned, num_least = llm.plan.host.num_slots, num_staging(llm.plan)
        assert answers(llm) == words
        check_home(llm, num_planned)
        for free_bytes, num_slots in ((100 << 20, num_least), (300 << 20, num_least)):
            system.free_bytes = free_bytes
            for _ in range(2):
                assert answers(llm) == words
                check_home(llm, num_slots)
        system.free_bytes = 1 << 40
        assert answers(llm) == words
        check_home(llm, num_planned)
        assert "host slots" in [name for name, *_ in account_rows(llm.stats())]
        slots = account_of(llm.stats())["host_slots"]
        assert slots["planned"] == num_planned == slots["now"]
        assert slots["given"] == slots["lent"] == num_planned - num_least


def test_under_every_preset_the_words_stay(
    model: Path, words: list[list[int]], system: System
) -> None:
    plan = plan_model(model, **EMULATED)
    limits = {
        "host_memory": home_of_share(plan, 0.6),
        "gpu_memory": plan.minimum_bytes + 20 * plan.fast_tier.slot_bytes,
    }
    with LLM(model, policy="lru", **limits, **EMULATED) as llm:
        num_planned, num_least = llm.plan.host.num_slots, num_staging(llm.plan)
        for policy in sorted(CATALOGUE.keys() - {"resident"}):
            if not substitutes(policy, {}):  # which change words
                llm.adopt_policy(policy)
                for free_bytes, num_slots in ((100 << 20, num_least), (1 << 40, num_planned)):
                    system.free_bytes = free_bytes
                    assert answers(llm) == words, policy
                    check_home(llm, num_slots)


def test_a_host_that_has_every_expert_keeps_them(
    model: Path, words: list[list[int]], system: System
) -> None:
    plan = plan_model(model, **EMULATED)
    gpu_memory = plan.minimum_bytes + 20 * plan.fast_tier.slot_bytes
    system.free_bytes = 100 << 20
    with LLM(model, gpu_memory=gpu_memory, **EMULATED) as llm:
        assert answers(llm) == words
        assert loop_of(llm).look(lambda engine: engine.home) is None
        assert "host_slots" not in account_of(llm.stats())


def test_a_refusal_of_the_system_leaves_what_there_is(
    model: Path, words: list[list[int]], system: System
) -> None:
    plan = plan_model(model, **EMULATED)
    limits = {"host_memory": home_of_share(plan, 0.5), "gpu_memory": plan.minimum_bytes}
    with LLM(model, policy="lowtide", **limits, **EMULATED) as llm:
        num_planned, num_least = llm.plan.host.num_slots, num_staging(llm.plan)
        system.free_bytes = 100 << 20
        assert answers(llm) == words
        arena = loop_of(llm).look(lambda engine: engine.home.slots.arena)
        system.free_bytes, arena.free_bytes = 1 << 40, lambda: 0
        assert answers(llm) == words
        check_home(llm, num_least)
        arena.free_bytes = available_memory_bytes
        assert answers(llm) == words
        check_home(llm, num_planned)
    assert physical_bytes(arena) == 0
