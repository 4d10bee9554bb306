"""How many new tokens there are where no number is given: what the context leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import GOLDENS
from typer.testing import CliRunner

from lowtide import LLM, DiffusionParams, SamplingParams
from lowtide.cli.app import app
from lowtide.decode.request import Committed, Event
from lowtide.engine.planning.passes import PlannedPass
from lowtide.errors import PlanError, UsageError
from lowtide.llm import check_request
from lowtide.model_writing.synth import synth
from lowtide.params import DEFAULT_CANVAS_TOKENS

CONTEXT = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth("olmoe", "tiny", tmp_path_factory.mktemp("synth") / "model", seed=1)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, context=CONTEXT) as llm:
        yield llm


def lengths(llm: LLM, prompts: list[list[int]], **wishes: object) -> list[int]:
    return [len(c.token_ids) for c in llm.generate(prompts, ignore_eos=True, **wishes)]


def test_the_context_bounds_the_default_and_nothing_else(llm: LLM) -> None:
    prompts = [[5] * n for n in (1, 3, CONTEXT - 1)]
    assert lengths(llm, prompts) == [CONTEXT - len(prompt) for prompt in prompts]
    assert lengths(llm, prompts[:1], n=2) == [CONTEXT - 1] * 2
    one, other = SamplingParams(ignore_eos=True), SamplingParams(ignore_eos=True, max_tokens=2)
    assert [len(c.token_ids) for c in llm.generate(prompts[:2], [one, other])] == [CONTEXT - 1, 2]
    with pytest.raises(PlanError, match="and 256 new ones need 257 tokens; the context is 48"):
        llm.generate([5], max_tokens=256)
    with pytest.raises(PlanError, match=f"{CONTEXT} prompt tokens leave no room for an answer"):
        llm.generate([5] * CONTEXT)


def test_answers_without_a_number_share_passes_and_the_context(folder: Path) -> None:
    """Room is taken as it is written: neither waits for the end of the other."""
    begun = set[int]()

    def note(event: Event) -> None:
        begun.update([event.request] if isinstance(event, Committed) else [])
        if len(begun) == 2:
            raise InterruptedError

    with LLM(folder, context=1024) as llm:
        with pytest.raises(InterruptedError):
            llm.generate([[5], [6]], None, note, ignore_eos=True)
        assert llm.stats()["committed_tokens"] < 1000


def test_a_canvas_without_a_number_is_no_longer_than_its_default() -> None:
    with LLM(GOLDENS / "llada-a", context=2 * DEFAULT_CANVAS_TOKENS) as llm:
        [answer] = llm.generate([[7] * 5], ignore_eos=True, block_length=256, steps=4)
    assert len(answer.token_ids) == DEFAULT_CANVAS_TOKENS


def test_the_model_s_positions_bound_it_too(folder: Path) -> None:
    with LLM(folder, context=64, config_overrides={"max_position_embeddings": 64}) as llm:
        assert lengths(llm, [[5] * 60]) == [4]


def test_each_of_two_requests_has_what_the_default_needs(folder: Path) -> None:
    with LLM(folder, context=CONTEXT) as llm:
        assert lengths(llm, [[5], [6, 7]]) == [CONTEXT - 1, CONTEXT - 2]


@pytest.mark.parametrize("name", ["llada-a", "dream-a", "llada2-a"])
def test_diffusion_models_fill_the_room(name: str) -> None:
    with LLM(GOLDENS / name, context=CONTEXT) as llm:
        room = llm.max_new_tokens(5, SamplingParams())
        assert lengths(llm, [[7] * 5]) == [room]


@pytest.mark.parametrize("block_length", [1, 3, 5, 7, 20, CONTEXT])
def test_blocks_of_a_request_s_own_length_fill_the_room(block_length: int) -> None:
    """In whole blocks: the last one must not reach beyond what the KV cache holds."""
    asked = SamplingParams(diffusion=DiffusionParams(block_length=block_length))
    with LLM(GOLDENS / "llada2-a", context=CONTEXT) as llm:
        room = llm.max_new_tokens(5, asked)
        free = llm.plan.context - 5
        assert free - block_length < room <= free
        assert lengths(llm, [[7] * 5], block_length=block_length, steps=1) == [room]
        with pytest.raises(PlanError, match="Lower `max_tokens` or raise `context`"):
            llm.generate([[7] * 5], max_tokens=room + 1, block_length=block_length)


def test_what_is_no_count_is_refused() -> None:
    """Too long a prompt leaves nothing, not less than that."""
    with LLM(GOLDENS / "llada-a", context=CONTEXT) as llm:
        assert llm.max_new_tokens(10 * CONTEXT, SamplingParams()) == 0
        with pytest.raises(UsageError, match="num_prompt_tokens must be an integer from 0"):
            llm.max_new_tokens(-1, SamplingParams())
        with pytest.raises(UsageError, match="params must be SamplingParams, not None"):
            llm.max_new_tokens(5, None)
        for wrong in (0, "x"):
            with pytest.raises(UsageError, match="num_tokens must be an integer from 1"):
                llm.planned_passes(wrong)
        with pytest.raises(UsageError, match="SamplingParams"):
            llm.planned_passes(8, 5)


def test_any_kind_of_integer_is_a_count() -> None:
    options = {"context": np.int64(CONTEXT), "seed": torch.tensor(3), "host_memory": 10**9}
    with LLM(GOLDENS / "llada-a", **options) as llm:
        for five in (np.int32(5), torch.tensor(5)):
            count: Any = five
            room = llm.max_new_tokens(count, SamplingParams(max_tokens=count))
            assert room == llm.max_new_tokens(5, SamplingParams()) and type(room) is int
            assert len(llm.planned_passes(count)) == len(llm.planned_passes(5))
        wrong: Any
        for wrong in (True, np.True_, np.float64(5), "5", None):
            with pytest.raises(UsageError, match="num_prompt_tokens must be an integer from 0"):
                llm.max_new_tokens(wrong, SamplingParams())


def test_blocks_and_guidance_are_counted() -> None:
    with LLM(GOLDENS / "llada-a", context=CONTEXT) as llm:
        assert lengths(llm, [[7] * 5], block_length=10, steps=40) == [40]
        room = llm.max_new_tokens(5, SamplingParams(diffusion=DiffusionParams(cfg_scale=1.0)))
        assert 0 < room < CONTEXT - 5
        with pytest.raises(PlanError, match="A block of 44 tokens is more than the 43 that 5"):
            llm.generate([[7] * 5], block_length=44)
        with pytest.raises(PlanError, match=f"{CONTEXT} prompt tokens leave no room"):
            llm.generate([[7] * CONTEXT], block_length=44)
        assert lengths(llm, [[7] * 5], cfg_scale=1.0) == [room]


@pytest.mark.parametrize(
    ("block_length", "num_new"), [(None, 256), (64, 256), (100, 200), (256, 256), (300, 300)]
)
def test_the_default_is_whole_blocks(block_length: int | None, num_new: int) -> None:
    """Nobody gave the 256 that a block would have to divide."""
    diffusion = DiffusionParams(block_length=block_length)
    assert SamplingParams(diffusion=diffusion).most_tokens == num_new
    check_request(GOLDENS / "llada-a", lambda _: [7], SamplingParams(diffusion=diffusion))


def test_passes_are_told_over_what_the_answer_will_have(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[tuple[int, int]]()

    def note(_: LLM, num_tokens: int, params: SamplingParams) -> list[PlannedPass]:
        told.append((num_tokens, params.most_tokens))
        return []

    monkeypatch.setattr(LLM, "planned_passes", note)
    asked = ["generate", str(GOLDENS / "llada-a"), "--prompt-ids", "5 6", "--context", str(CONTEXT)]
    for more, num_tokens in (([], CONTEXT), (["--max-tokens", "9"], 11)):
        assert not CliRunner().invoke(app, [*asked, *more]).exit_code
        assert told.pop() == (num_tokens, num_tokens - 2)


def test_a_text_beyond_the_positions_asks_for_no_new_tokens(folder: Path) -> None:
    with LLM(folder, context=64, config_overrides={"max_position_embeddings": 32}) as llm:
        with pytest.raises(PlanError, match="A text of 33 .*: this model has 32 positions. Short"):
            llm.logits([5] * 33)
        with pytest.raises(PlanError, match="32 prompt tokens and 1 new ones are more than the 32"):
            llm.generate([[5] * 32], max_tokens=1)
