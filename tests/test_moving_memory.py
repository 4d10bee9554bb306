"""A model whose KV cache and expert slots share their memory: the same words, within the budget.

Nothing is kept of sequences that ended (`cache="off"`), so that memory moves with each of them;
with what is kept see test_conversations.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from family_models import write_model
from inside import loop_of
from stranger_parts import devices as stranger
from test_paged_arena import physical_bytes
from whole import passes_watched

from lowtide import LLM, SamplingParams
from lowtide.decode.batch_decoder import BatchDecoder
from lowtide.decode.request import Event
from lowtide.devices.kind import KINDS, DeviceKind, DeviceRequest, OpenDevice, register_device
from lowtide.engine.running.engine import Engine
from lowtide.engine.running.moving_memory import MovingMemory
from lowtide.errors import DeviceError, PageError, PlanError
from lowtide.llm import plan_model
from lowtide.plan import MemoryPlan
from lowtide.policies.catalogue import CATALOGUE
from lowtide.policies.presets import substitutes

CONTEXT = 2048
PROMPTS = [[(7 * i + n) % 90 for i in range(n)] for n in (9, 300, 40, 700)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moving") / "model"
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"num_experts": 24, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "decoder_sparse_step": 1}
    sizes["max_position_embeddings"] = CONTEXT
    return write_model("qwen3_moe", 0, folder, **heads, **experts, **sizes).folder


@pytest.fixture(scope="module")
def words(model: Path) -> list[list[int]]:
    with LLM(model, context=CONTEXT) as llm:
        return answers(llm)


def answers(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    return [completion.token_ids for completion in llm.generate(prompts, params)]


def budget(plan: MemoryPlan, num_residents: int) -> int:
    return plan.minimum_bytes + num_residents * plan.host.slot_bytes


def moving_of(llm: LLM) -> MovingMemory:
    def look(engine: Engine) -> MovingMemory:
        assert engine.moving is not None
        return engine.moving

    return loop_of(llm).look(look)


def take_slots(llm: LLM) -> None:
    """As another part of the model that wants more memory than there is."""
    budget = moving_of(llm).shared.budget
    loop_of(llm).run(lambda _: budget.ask(1 << 40))


def check_slots_moved(llm: LLM) -> None:
    stats = llm.stats()
    assert stats["num_slots_lent"] > 0 and stats["num_slots_given"] > 0


@pytest.fixture
def watched() -> Iterator[list[dict[str, int]]]:
    """Record the memory of each part after every pass; together they must not exceed the budget."""
    shares: list[dict[str, int]] = []

    def note(engine: Engine) -> None:
        if engine.moving is None:
            return
        shared, num_staging = engine.moving.shared, engine.plan.num_staging
        pages, experts = shared.budget, engine.experts
        shares.append(pages.shares())
        assert pages.num_free_bytes >= 0
        assert shared.kv.committed_bytes == shares[-1]["KV cache"]
        assert shared.arena.committed_bytes == shares[-1]["expert slots"]
        slots, ledger = shared.slots, shared.slots.ledger
        if experts.device is None:
            ledger.check_integrity()
            assert ledger.num_resident + num_staging <= slots.num_live
        assert ledger.num_resident <= slots.num_live
        assert experts.capacity.per_layer.sum() + num_staging <= slots.num_live

    with passes_watched(note):
        yield shares


def num_running_at_most(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sequences had room after each pass."""
    counts: list[int] = []
    step = BatchDecoder.step

    def watch(self: BatchDecoder) -> list[Event]:
        events = step(self)
        counts.append(len(self.running))
        return events

    monkeypatch.setattr(BatchDecoder, "step", watch)
    return counts


def test_slots_make_room_for_more_sequences_than_were_planned(
    model: Path, watched: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences join as long as slots could hold them to their ends; nobody is ever stranded."""
    context = 512
    prompts = [[(11 * i + n) % 90 for i in range(480 + n % 9)] for n in range(12)]
    with LLM(model, context=16 * context) as llm:
        expected = answers(llm, prompts)
    options: dict[str, Any] = {"context": context, "policy": "lru", "cache": "off"}
    counts = num_running_at_most(monkeypatch)
    host_memory = budget(plan_model(model, context=context), 20)
    with LLM(model, host_memory=host_memory, **options) as llm:
        assert answers(llm, prompts) == expected
        plan, stats = llm.plan, llm.stats()
        with pytest.raises(PlanError, match="the context is 512"):
            answers(llm, [[1] * 501])
    assert 1 < plan.max_cache_tokens // context <= max(counts) < len(prompts)
    assert plan.max_cache_tokens >= 3 * context
    token_bytes = plan.host.kv_cache_bytes // context
    slots_bytes = 20 * plan.host.slot_bytes
    assert abs(plan.max_cache_tokens - context - slots_bytes // token_bytes) <= 32
    assert max(shares["KV cache"] for shares in watched) > 2 * plan.host.kv_cache_bytes
    assert stats["num_slots_given"] >= 20


def test_memory_goes_to_a_system_that_runs_short_of_it_and_comes_back(
    model: Path, words: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request fails for it, and no token is another."""
    plan = plan_model(model, context=CONTEXT)
    options: dict[str, Any] = {"context": CONTEXT, "host_memory": budget(plan, 20)}
    free_bytes = 1 << 40
    monkeypatch.setattr(
        "lowtide.engine.running.moving_slots.available_memory_bytes", lambda: free_bytes
    )
    monkeypatch.setattr("lowtide.engine.running.moving_slots.LOOK_S", 0.0)
    with LLM(model, policy="lru", **options) as llm:
        assert answers(llm) == words
        held = llm.stats()["num_slots"]
        free_bytes = 100 << 20
        assert answers(llm) == words
        assert llm.stats()["num_slots"] == llm.plan.num_staging
        shares = moving_of(llm).shared.budget.shares()
        loop_of(llm).look(Engine.release_memory)
        assert shares["KV cache"] >= moving_of(llm).shared.budget.shares()["KV cache"] == 0
        free_bytes = 1 << 40
        assert answers(llm) == words
        assert llm.stats()["num_slots"] > llm.plan.num_staging and held > llm.plan.num_staging


def test_a_devices_slots_make_room_for_its_cache(
    model: Path, words: list[list[int]], watched: list[dict[str, int]]
) -> None:
    """Its copies and moves are under way, and end, while slots come and go."""
    emulated: dict[str, Any] = {"device": "emulated", "policy": "lowtide", "context": 1024}
    plan = plan_model(model, **emulated)
    gpu_memory = plan.minimum_bytes + 20 * plan.gpu.slot_bytes
    with LLM(model, cache="off", gpu_memory=gpu_memory, **emulated) as llm:
        assert llm.plan.max_cache_tokens > 1024
        for _ in range(2):
            assert answers(llm) == words
        assert [answers(llm, [prompt])[0] for prompt in PROMPTS] == words
        take_slots(llm)
        assert llm.stats()["num_slots"] == llm.plan.num_staging
        assert answers(llm, PROMPTS[1:2]) == words[1:2]
        check_slots_moved(llm)
    assert max(shares["KV cache"] for shares in watched) > 4 * min(
        shares["KV cache"] for shares in watched
    )


@pytest.mark.parametrize("num_residents", [0, 20])
def test_a_device_whose_slots_lie_elsewhere_is_told_at_opening(
    model: Path, words: list[list[int]], num_residents: int
) -> None:
    """One that has its own memory is refused where memory moves, and runs where none does."""

    def open_elsewhere(request: DeviceRequest) -> OpenDevice:
        return stranger.SECOND_HOST.open(replace(request, arena=None))

    options: dict[str, Any] = {"device": "elsewhere", "policy": "lowtide", "context": CONTEXT}
    register_device("elsewhere", DeviceKind(open_elsewhere, stranger.check, is_paced=True))
    try:
        plan = plan_model(model, **options)
        gpu_memory = plan.minimum_bytes + num_residents * plan.gpu.slot_bytes
        with pytest.raises(DeviceError, match=r"DeviceRequest\.open_slots"):
            LLM(model, gpu_memory=gpu_memory, **options)
        with LLM(model, **options) as llm:
            assert answers(llm) == words
        KINDS["elsewhere"] = stranger.SECOND_HOST  # which opens them there
        with LLM(model, gpu_memory=gpu_memory, **options) as llm:
            assert answers(llm) == words and llm.stats()["num_slots_lent"] > 0
    finally:
        del KINDS["elsewhere"]


def test_under_every_preset_contexts_come_and_go(
    model: Path, watched: list[dict[str, int]]
) -> None:
    """Random prompts, some together, under one preset after the other."""
    draw = random.Random(0)
    plan = plan_model(model, context=CONTEXT)
    prompts = [[draw.randrange(90) for _ in range(draw.choice([3, 60, 500]))] for _ in range(12)]
    with LLM(model, context=CONTEXT) as llm:
        expected = {tuple(prompt): answers(llm, [prompt])[0] for prompt in prompts}
    options: dict[str, Any] = {"context": CONTEXT, "host_memory": budget(plan, 8)}
    with LLM(model, policy="lru", cache="off", **options) as llm:
        for policy in sorted(CATALOGUE):
            if policy != "resident" and not substitutes(policy, {}):  # which change words
                llm.adopt_policy(policy)
            for _ in range(2):
                several = draw.sample(prompts, draw.choice([1, 2, 3]))
                assert answers(llm, several) == [expected[tuple(each)] for each in several]
        stats = llm.stats()
    assert stats["num_slots_lent"] > 0 and stats["num_slots_given"] > 0
    assert max(shares["expert slots"] for shares in watched) > 12 * plan.host.slot_bytes
    cache = [shares["KV cache"] for shares in watched]
    assert max(cache) > 4 * min(cache)


def test_beside_a_device_every_other_preset_keeps_the_words(
    model: Path, words: list[list[int]], watched: list[dict[str, int]]
) -> None:
    """On one engine, whose memory goes and comes."""
    emulated: dict[str, Any] = {"device": "emulated", "context": 1024}
    plan = plan_model(model, **emulated)
    gpu_memory = plan.minimum_bytes + 20 * plan.gpu.slot_bytes
    others = sorted(CATALOGUE.keys() - {"resident", "lowtide"})
    with LLM(model, policy="lru", cache="off", gpu_memory=gpu_memory, **emulated) as llm:
        for policy in others:
            if not substitutes(policy, {}):  # which change words
                llm.adopt_policy(policy)
                assert answers(llm) == words, policy
                assert answers(llm, PROMPTS[:1]) == words[:1], policy
        check_slots_moved(llm)
    cache = [shares["KV cache"] for shares in watched]
    assert max(cache) > 4 * min(cache)


def test_a_policy_that_begins_again_has_the_planned_slots(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_model(model, context=CONTEXT)
    options: dict[str, Any] = {"context": CONTEXT, "host_memory": budget(plan, 12)}
    with LLM(model, policy="lru", cache="off", **options) as llm:
        moving = moving_of(llm)
        expected = answers(llm, PROMPTS[:1])
        take_slots(llm)
        assert llm.stats()["num_slots"] == llm.plan.num_staging < llm.plan.host.num_slots
        llm.adopt_policy("static")
        assert llm.stats()["num_slots"] == llm.plan.host.num_slots
        assert answers(llm, PROMPTS[:1]) == expected
        take_slots(llm)
        monkeypatch.setattr(moving.shared.arena, "free_bytes", lambda: 0)
        with pytest.raises(PageError, match="expert slots wants"):
            llm.adopt_policy("lru")
        assert answers(llm, PROMPTS[:1]) == expected


def test_at_the_least_budget_the_cache_lends_what_it_does_not_use(
    model: Path, words: list[list[int]], watched: list[dict[str, int]]
) -> None:
    plan = plan_model(model, context=CONTEXT)
    options: dict[str, Any] = {"context": CONTEXT, "host_memory": plan.minimum_bytes}
    misses = []
    for lends in (False, True):
        with pytest.MonkeyPatch.context() as patch, LLM(model, policy="lru", **options) as llm:
            if not lends:
                patch.setattr(MovingMemory, "settle", lambda memory: None)
            assert [answers(llm, [prompt])[0] for prompt in PROMPTS[:3]] == words[:3]
            misses.append(llm.stats()["num_misses"])
    assert misses[1] < misses[0] / 2


def test_logits_of_a_whole_context_find_their_memory(
    model: Path, watched: list[dict[str, int]]
) -> None:
    plan = plan_model(model, context=CONTEXT)
    tokens = [3 * i % 90 for i in range(CONTEXT)]
    with LLM(model, context=CONTEXT) as llm:
        expected = llm.logits(tokens)
    options: dict[str, Any] = {"context": CONTEXT, "host_memory": budget(plan, 12)}
    with LLM(model, policy="lru", cache="off", **options) as llm:
        answers(llm, PROMPTS[:1])
        assert llm.stats()["num_slots_lent"] > 0
        assert bool((llm.logits(tokens) == expected).all())
        assert llm.stats()["num_slots_given"] > 0


def test_memory_returns_when_the_model_is_closed(model: Path) -> None:
    plan = plan_model(model, context=CONTEXT)
    llm = LLM(
        model,
        policy="lru",
        cache="off",
        context=CONTEXT,
        host_memory=budget(plan, 12),
    )
    shared = moving_of(llm).shared
    answers(llm)
    assert physical_bytes(shared.arena) == shared.arena.committed_bytes > 0
    llm.close()
    [(arena, _)] = shared.kv.arenas
    assert physical_bytes(shared.arena) == physical_bytes(arena) == 0
    assert shared.budget.num_free_bytes == shared.budget.num_bytes
    llm.close()


def test_where_everything_fits_nothing_is_lent(model: Path) -> None:
    with LLM(model, context=CONTEXT, cache="off") as llm:
        assert loop_of(llm).look(lambda engine: engine.moving) is None


def test_a_system_with_less_than_the_budget_takes_slots_then_one_request(
    model: Path, words: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is reached from outside, while running."""
    plan = plan_model(model, context=CONTEXT)
    options: dict[str, Any] = {"context": CONTEXT, "host_memory": budget(plan, 20)}
    with LLM(model, policy="lru", cache="off", **options) as llm:
        assert answers(llm, PROMPTS[:1]) == words[:1]
        moving = moving_of(llm)
        [(kv, _)], slots = moving.shared.kv.arenas, moving.shared.arena

        def held_bytes() -> int:
            return kv.committed_bytes + slots.committed_bytes

        limit_bytes = held_bytes()
        for arena in (kv, slots):
            monkeypatch.setattr(arena, "free_bytes", lambda: max(0, limit_bytes - held_bytes()))
        num_given = llm.stats()["num_slots_given"]
        assert answers(llm, PROMPTS[:2]) == words[:2]
        assert llm.stats()["num_slots_given"] > num_given
        limit_bytes = 0
        with pytest.raises(PageError, match="KV cache wants"):
            answers(llm, PROMPTS[3:])
        limit_bytes = 1 << 40
        assert answers(llm) == words


def test_a_long_cache_has_workspace_for_the_longest_sequence_that_there_can_be(
    model: Path,
) -> None:
    """The cache is for all running sequences; none has more tokens than the model positions."""
    needed = [plan_model(model, context=tokens).host.workspace_bytes for tokens in (2048, 16384)]
    assert needed[0] == needed[1]
