"""Conversations with whole models; drawn ones are in test_drawn_conversations.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from examples import scaled
from inside import loop_of
from torch import Tensor

from lowtide import LLM, DiffusionParams, SamplingParams
from lowtide.core import RowKind
from lowtide.engine.opening.config import MAX_PASS_ROWS
from lowtide.engine.running.engine import Engine
from lowtide.engine.running.kept_room import KeptRoom
from lowtide.errors import UsageError
from lowtide.layers.batch import Batch
from lowtide.llm import plan_model
from lowtide.model_writing.synth import synth
from lowtide.models.decoder import Decoder
from lowtide.policies.kept_keys import MemoryPrices

FAMILIES = ("qwen3_moe", "deepseek_v2", "gpt_oss", "llada2")
"""Plain keys and values, latent ones, windows, blocks."""

WITH_STATES = ("lfm2_moe", "qwen3_5_moe", "qwen3_next")

BLOCK_LENGTH = 8

DEAR_KEYS = MemoryPrices(token_s=1.0, token_bytes=1, read_s=1e-6, slot_bytes=1 << 20)
DEAR_SLOTS = MemoryPrices(token_s=1e-6, token_bytes=1 << 20, read_s=1.0, slot_bytes=1)
"""Prices that passes may have been measured to have."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("talk")
    return {family: synth(family, "tiny", folder / family, seed=5) for family in FAMILIES}


def params(family: str, max_tokens: int = 12, **others: Any) -> SamplingParams:
    diffusion = DiffusionParams()
    if family == "llada2":
        diffusion = DiffusionParams(block_length=BLOCK_LENGTH, steps=2)
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, diffusion=diffusion, **others)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_ids_are_those_of_a_cold_run_but_for_ties(
    models: dict[str, Path], family: str
) -> None:
    options: dict[str, Any] = {"context": 2048, "dtype": "float32"}
    with LLM(models[family], **options) as llm, LLM(models[family], cache="off", **options) as cold:
        vocab = cold.config.vocab_size - 2
        first: list[int] = []  # the first prompt and its answer, which the others go on behind
        num_cached = 0
        for num_dropped, num_added in ((0, 140), (0, 20), (5, 9)):
            added = [(31 * i + num_added) % vocab for i in range(num_added)]
            prompt = first[: len(first) - num_dropped] + added
            [answer] = llm.generate([prompt], params(family))
            first = first or [*prompt, *answer.token_ids]
            [again] = llm.generate([prompt], params(family))
            num_cached += again.usage.cached_tokens
            [expected] = cold.generate([prompt], params(family))
            assert not expected.usage.cached_tokens
            for found in (answer.token_ids, again.token_ids):
                if family == "llada2":
                    assert found == expected.token_ids
                else:
                    check_same_but_for_ties(cold, prompt, found, expected.token_ids)
        assert num_cached > 300


@pytest.mark.parametrize("family", WITH_STATES)
def test_a_turn_of_a_model_with_states_is_one_pass(
    tmp_path_factory: pytest.TempPathFactory, family: str
) -> None:
    """Or one for each chunk of 512 rows; its ids are those of a cold run but for ties."""
    folder = synth(family, "tiny", tmp_path_factory.mktemp("states") / family, seed=5)
    options: dict[str, Any] = {"context": 2048, "dtype": "float32"}
    rng, told = Random(3), Counter[str]()
    with LLM(folder, **options) as llm, LLM(folder, cache="off", **options) as cold:
        for _ in range(scaled(10)):
            talk = ids(rng, rng.choice((2, 30, 63, 64, 65, 200, 600)))
            for _ in range(4):
                with prompt_rows_noted() as passes:
                    [found] = llm.generate([talk], params(family, 6))
                num_cached = found.usage.cached_tokens
                assert passes == chunk_lengths(num_cached, len(talk))
                told["turns"] += 1
                told["resumed"] += num_cached > 0
                [expected] = cold.generate([talk], params(family, 6))
                check_same_but_for_ties(cold, talk, found.token_ids, expected.token_ids)
                left_out = rng.choice((0, 0, 3, 7, 40))  # the last of the answer, or all of it
                text = [*talk, *found.token_ids]
                talk = text[: max(1, len(text) - left_out)] + ids(rng, rng.choice((1, 2, 24, 90)))
    assert told["resumed"] > 0.3 * told["turns"]


def ids(rng: Random, count: int) -> list[int]:
    return [rng.randrange(200) for _ in range(count)]


def chunk_lengths(first: int, stop: int) -> list[int]:
    """Of passes over the positions up to `stop`, as many as fit in each."""
    found = []
    while stop - first > MAX_PASS_ROWS:
        end = (first + MAX_PASS_ROWS) // 64 * 64
        found.append(end - first)
        first = end
    return [*found, stop - first]


@contextmanager
def prompt_rows_noted() -> Iterator[list[int]]:
    """Yield the numbers of rows of prompts, by pass that has any."""
    found: list[int] = []
    forward = Decoder.forward

    def noting(decoder: Decoder, batch: Batch) -> Tensor:
        kinds = batch.step.rows_of(len(batch.token_ids)).kind
        if num_rows := int((kinds == RowKind.PROMPT).sum()):
            found.append(num_rows)
        return forward(decoder, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "forward", noting)
        yield found


def check_same_but_for_ties(
    cold: LLM, prompt: list[int], found: Sequence[int], expected: Sequence[int]
) -> None:
    if found != expected:
        pairs = zip(found, expected, strict=True)
        place = next(i for i, (own, other) in enumerate(pairs) if own != other)
        best = cold.logits([*prompt, *found[:place]])[-1].topk(2).values
        assert float(best[0] - best[1]) <= 1e-5 * float(best[0].abs())


@pytest.mark.parametrize(
    ("family", "budget"),
    [
        *((family, "all") for family in FAMILIES),
        *((family, "little") for family in ("gpt_oss", "llada2")),
    ],
)
def test_exactly_gives_the_ids_of_a_cold_run_in_bfloat16(
    models: dict[str, Path], family: str, budget: str
) -> None:
    options: dict[str, Any] = {"context": 2048, "dtype": "bfloat16"}
    if budget != "all":
        plan = plan_model(models[family], **options)
        options["host_memory"] = plan.minimum_bytes + 4 * plan.host.slot_bytes
    length = 700 if family == "llada2" else 1100  # its tiny model has 1,024 positions
    long = [(13 * i + i // 9) % 90 for i in range(length)]
    with LLM(models[family], cache="exact", **options) as llm:
        [first] = llm.generate([long], params(family))
        talk = [*long, *first.token_ids, 5, 6, 7]
        [second] = llm.generate([talk], params(family))
        [branch] = llm.generate([[*long[:600], 8, 9]], params(family))
    cached = [one.usage.cached_tokens for one in (first, second, branch)]
    # Windows have gone on by then, and nobody knew that a turn would leave the prompt there.
    assert cached == [0, length // 512 * 512, 0 if family == "gpt_oss" else 512]
    for prompt, found in ((talk, second), ([*long[:600], 8, 9], branch)):
        with LLM(models[family], cache="off", **options) as cold:
            [expected] = cold.generate([prompt], params(family))
        assert found.token_ids == expected.token_ids


@pytest.mark.parametrize("is_measured", [False, True])
def test_several_at_once_and_n_answers_stay_within_the_plan(
    models: dict[str, Path], is_measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a budget that few experts fit in.

    Before anything was measured kept keys take no planned slot; after that they may, where they
    save more, and never the last ones.
    """
    monkeypatch.setattr(KeptRoom, "prices", DEAR_KEYS if is_measured else None)
    options: dict[str, Any] = {"context": 512, "dtype": "float32"}
    plan = plan_model(models["qwen3_moe"], **options)
    budget = plan.minimum_bytes + 6 * plan.host.slot_bytes
    prompts = [[(7 * i + n) % 90 for i in range(200)] for n in range(6)]
    with LLM(models["qwen3_moe"], cache="off", **options) as cold:
        expected = [c.token_ids for c in cold.generate(prompts, params("qwen3_moe"))]
    with LLM(models["qwen3_moe"], host_memory=budget, **options) as llm:
        for _ in range(3):
            found = [c.token_ids for c in llm.generate(prompts, params("qwen3_moe"))]
            assert found == expected
            check_kept(llm, 6 * 212 if is_measured else 512)
        many = llm.generate([prompts[0]], params("qwen3_moe", n=3, temperature=0.8))
        assert len(many) == 3
        check_kept(llm, 6 * 212 if is_measured else 512)
        many = llm.generate([[*prompts[0], 1]], params("qwen3_moe"))
        assert many[0].usage.cached_tokens == 200


def check_kept(llm: LLM, most_tokens: int) -> None:
    """No more is kept than that, all is within the budget, and no staging slot is gone."""

    def look(engine: Engine) -> tuple[int, int, int]:
        assert engine.moving is not None
        cache, pages = engine.kv_cache, engine.moving.shared.budget
        assert pages.num_free_bytes >= 0
        assert engine.as_dict()["num_slots"] >= engine.plan.num_staging
        num_usable = sum(kept.num_usable for kept in cache.kept)
        return num_usable, len(cache.kept), len(cache.taken)

    num_usable, num_kept, num_taken = loop_of(llm).run(look)
    assert 0 < num_usable <= most_tokens and num_kept == num_taken
    assert num_usable > 512 or most_tokens == 512


def test_keys_that_nothing_goes_on_from_give_way_to_experts(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long conversation is forgotten while another runs, whose experts get its memory."""
    options: dict[str, Any] = {"context": 512, "dtype": "float32"}
    plan = plan_model(models["qwen3_moe"], context=512, dtype="float32")
    budget = plan.minimum_bytes + 6 * plan.host.slot_bytes
    long, short = [(7 * i) % 90 for i in range(400)], [5, 6, 7]
    slots, words = [], []
    for prices in (DEAR_KEYS, DEAR_SLOTS):
        monkeypatch.setattr(KeptRoom, "prices", prices)
        with LLM(models["qwen3_moe"], host_memory=budget, **options) as llm:
            llm.generate([long], params("qwen3_moe"))
            kept = llm.stats()["num_kept"]
            [answer] = llm.generate([short], params("qwen3_moe", max_tokens=100))
            stats = llm.stats()
            slots.append(stats["num_slots"])
            words.append(answer.token_ids)
            assert kept == 1 and stats["num_kept_given_up"] == (prices is DEAR_SLOTS)
            [again] = llm.generate([long], params("qwen3_moe"))
            assert (again.usage.cached_tokens > 0) == (prices is DEAR_KEYS)
    assert words[0] == words[1] and slots[0] < slots[1]


def test_experts_that_want_their_slots_back_get_them(models: dict[str, Path]) -> None:
    options: dict[str, Any] = {"context": 512, "dtype": "float32"}
    plan = plan_model(models["qwen3_moe"], context=512, dtype="float32")
    budget = plan.minimum_bytes + 6 * plan.host.slot_bytes
    with LLM(models["qwen3_moe"], host_memory=budget, **options) as llm:
        llm.generate([list(range(90)) * 4], params("qwen3_moe"))

        def ask(engine: Engine) -> tuple[int, int]:
            before = len(engine.kv_cache.kept)
            engine.kv_cache.pages.account.give_way(1)  # type: ignore[union-attr, misc]
            return before, len(engine.kv_cache.kept)

        assert loop_of(llm).run(ask) == (1, 0)
        [again] = llm.generate([list(range(90)) * 4], params("qwen3_moe"))
        assert again.usage.cached_tokens == 0


def test_logits_get_the_room_of_what_is_kept(models: dict[str, Path]) -> None:
    with LLM(models["qwen3_moe"], context=256, dtype="float32") as llm:
        [first] = llm.generate([[3] * 200], params("qwen3_moe"))
        expected = llm.logits(list(range(90)) * 2)
        [again] = llm.generate([[3] * 200], params("qwen3_moe"))
        assert again.usage.cached_tokens == 0 and again.token_ids == first.token_ids
        assert torch.equal(llm.logits(list(range(90)) * 2), expected)


def test_a_wrong_value_of_cache_is_refused(models: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="cache"):
        plan_model(models["qwen3_moe"], cache="always")
