"""Bidirectional passes whose workspace shares its memory with expert slots: the same words."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from poison import PoisonedWorkspace
from test_moving_memory import moving_of
from test_paged_arena import physical_bytes
from whole import passes_watched

from lowtide import LLM, DiffusionParams, SamplingParams
from lowtide.engine.running import pass_room
from lowtide.engine.running.engine import Engine
from lowtide.errors import PageError
from lowtide.llm import plan_model
from lowtide.model_writing.synth import synth
from lowtide.policies.catalogue import CATALOGUE
from lowtide.policies.presets import substitutes

CONTEXT = 1024
PROMPT = np.random.default_rng(1).integers(0, 40, 900).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth("llada_moe", "tiny", tmp_path_factory.mktemp("made") / "m", seed=2)


def answers(llm: LLM) -> tuple[list[list[int]], torch.Tensor]:
    """Of a sequence that is nearly all prompt, of one nearly all masks, of two short ones."""
    found = []
    for num_prompt, max_tokens, steps in ((900, 64, 2), (60, 640, 2), (20, 32, 32), (400, 16, 2)):
        diffusion = DiffusionParams(steps=steps, block_length=max_tokens)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, diffusion=diffusion)
        [completion] = llm.generate([PROMPT[:num_prompt]], params)
        found.append(list(completion.token_ids))
    return found, llm.logits(PROMPT[:700])


@pytest.fixture(scope="module")
def expected(model: Path) -> tuple[list[list[int]], torch.Tensor]:
    with LLM(model, context=CONTEXT) as llm:
        return answers(llm)


@pytest.fixture
def watched() -> Iterator[list[dict[str, int]]]:
    """Record the memory of each part after every pass.

    The budget is never exceeded, and every page has an owner.
    """
    shares: list[dict[str, int]] = []

    def note(engine: Engine) -> None:
        if engine.moving is None:
            return
        shared = engine.moving.shared
        shares.append(shared.budget.shares())
        assert shared.budget.num_free_bytes >= 0
        assert physical_bytes(shared.arena) == shares[-1]["expert slots"]
        assert physical_bytes(shared.room.arena) <= shares[-1]["workspace"]
        assert shared.slots.num_live >= engine.plan.num_staging

    with passes_watched(note):
        yield shares


@pytest.mark.parametrize("kv_cache", [True, "prefix"])
def test_slots_have_what_passes_do_not_need(
    kv_cache: bool | str,
    model: Path,
    expected: tuple[list[list[int]], torch.Tensor],
    watched: list[dict[str, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NaN wherever nothing is alive."""
    monkeypatch.setattr(pass_room, "Workspace", PoisonedWorkspace)
    options: dict[str, Any] = {"context": CONTEXT, "kv_cache": kv_cache, "policy": "lowtide"}
    plan = plan_model(model, **options)
    host_memory = plan.minimum_bytes + 4 * plan.host.slot_bytes
    with LLM(model, **options | {"policy": "resident"}) as llm:
        found = [answers(llm)]
    with LLM(model, host_memory=host_memory, **options) as llm:
        found.append(answers(llm))
        stats, num_slots = llm.stats(), llm.plan.host.num_slots
    if kv_cache is True:
        found.append(expected)
    for ids, logits in found[1:]:
        assert ids == found[0][0] and torch.equal(logits, found[0][1])
    assert ("KV cache" in watched[0]) == (kv_cache == "prefix")
    assert stats["num_slots_lent"] > 0 and stats["num_slots_given"] > 0
    most = max(shares["expert slots"] for shares in watched)
    assert most > num_slots * plan.host.slot_bytes
    workspace = [shares["workspace"] for shares in watched]
    assert max(workspace) > 1.8 * min(workspace)
    assert most + max(workspace) > host_memory - plan.host.dense_bytes - plan.host.ring_bytes


def test_under_every_preset_passes_come_and_go(
    model: Path, watched: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random lengths, guided or not, some together, under one preset after the other."""
    monkeypatch.setattr(pass_room, "Workspace", PoisonedWorkspace)
    draw = random.Random(0)
    plan = plan_model(model, context=CONTEXT)
    with LLM(model, context=CONTEXT) as llm:
        asked = [random_request(draw) for _ in range(8)]
        expected = [words(llm, [one]) for one in asked]
    options: dict[str, Any] = {"context": CONTEXT, "policy": "lru"}
    host_memory = plan.minimum_bytes + 4 * plan.host.slot_bytes
    with LLM(model, host_memory=host_memory, **options) as llm:
        for policy in sorted(CATALOGUE):
            if policy != "resident" and not substitutes(policy, {}):  # which change words
                llm.adopt_policy(policy)
            several = draw.sample(range(len(asked)), draw.choice([1, 2, 3]))
            found = words(llm, [asked[index] for index in several])
            assert found == [word for index in several for word in expected[index]], policy
        stats = llm.stats()
    assert stats["num_slots_lent"] > 0 and stats["num_slots_given"] > 0
    workspace = [shares["workspace"] for shares in watched]
    assert max(workspace) > min(workspace)


def random_request(draw: random.Random) -> tuple[list[int], SamplingParams]:
    cfg_scale = draw.choice([0.0, 0.0, 1.5])
    num_prompt = draw.choice([3, 60, 400] if cfg_scale else [3, 60, 400, 800])
    max_tokens = draw.choice([8, 96])
    diffusion = DiffusionParams(steps=3, block_length=max_tokens, cfg_scale=cfg_scale)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, diffusion=diffusion)
    return [draw.randrange(40) for _ in range(num_prompt)], params


def words(llm: LLM, asked: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    prompts, params = zip(*asked, strict=True)
    return [completion.token_ids for completion in llm.generate(list(prompts), list(params))]


def test_a_device_shares_its_own_memory(
    model: Path,
    expected: tuple[list[list[int]], torch.Tensor],
    watched: list[dict[str, int]],
) -> None:
    options: dict[str, Any] = {"context": CONTEXT, "device": "emulated", "policy": "lru"}
    plan = plan_model(model, **options)
    gpu_memory = plan.minimum_bytes + 8 * plan.gpu.slot_bytes
    with LLM(model, gpu_memory=gpu_memory, **options) as llm:
        ids, logits = answers(llm)
        assert ids == expected[0] and torch.equal(logits, expected[1])
        assert llm.stats()["num_slots_lent"] > 0
    assert {"workspace", "expert slots"} == watched[0].keys()


def test_a_pass_that_the_system_refuses_fails_alone_and_memory_returns(
    model: Path, expected: tuple[list[list[int]], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_model(model, context=CONTEXT)
    host_memory = plan.minimum_bytes + 4 * plan.host.slot_bytes
    with LLM(model, policy="lru", context=CONTEXT, host_memory=host_memory) as llm:
        shared = moving_of(llm).shared
        llm.logits(PROMPT[:20])
        limit_bytes = 0
        for arena in (shared.room.arena, shared.arena):
            monkeypatch.setattr(arena, "free_bytes", lambda: limit_bytes)
        with pytest.raises(PageError, match="workspace wants"):
            llm.logits(PROMPT)
        limit_bytes = 1 << 40
        assert torch.equal(llm.logits(PROMPT[:700]), expected[1])
    assert physical_bytes(shared.arena) == physical_bytes(shared.room.arena) == 0
    assert shared.budget.num_free_bytes == shared.budget.num_bytes
