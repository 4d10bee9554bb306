"""The block decoder over a model of hashes, held against the published loop.

Hashes are exact, so everything is compared exactly. Published trajectories over a real model are in
test_llm_goldens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import whole
from common.glm4 import block_causal_mask
from diffusers import BlockRefinementScheduler
from examples import examples
from hash_model import EOS, MASK, VOCAB, HashModel, Stubborn, hash_logits, make_kv_cache
from hypothesis import given
from hypothesis import strategies as st
from kind_decoders import blocks_decoder
from oracle import GOLDENS, load_oracle
from safetensors.torch import load_file
from whole import decoded, own_events, trajectories_noted

from lowtide.core import StepKind
from lowtide.decode.request import Draft, Event, Finished, Prefill, Request
from lowtide.params import DiffusionParams


def make_request(
    index: int = 0,
    prompt: Sequence[int] = (1, 2, 4),
    eos_token_ids: Sequence[int] = (EOS,),
    **params: Any,
) -> Request:
    names = DiffusionParams.__dataclass_fields__
    diffusion = {"block_length": 4, "steps": 4, "threshold": 0.9}
    diffusion |= {name: value for name, value in params.items() if name in names}
    others = {name: value for name, value in params.items() if name not in names}
    asked = DiffusionParams(**diffusion)
    return whole.make_request(index, prompt, eos_token_ids, **others, diffusion=asked)


class Run:
    """A finished run over a `HashModel`: events, token rows into passes, and what was freed."""

    def __init__(
        self,
        requests: Iterable[Request],
        num_tokens: int = 512,
        max_rows: int = 64,
        use_kv_cache: bool = True,
        can_mask: bool = True,
    ) -> None:
        self.kv_cache = make_kv_cache(num_tokens)
        self.model = HashModel(self.kv_cache, max_rows, can_mask)
        self.decoder = blocks_decoder(self.model, self.kv_cache, MASK, max_rows, use_kv_cache)
        with trajectories_noted() as self.trajectories:
            self.events = decoded(self.decoder, requests)
        self.finished = {e.request: e for e in self.events if isinstance(e, Finished)}

    def of(self, index: int) -> tuple[list[Event], list[list[int]]]:
        """Return a request's events and rows.

        They must not depend on neighbours, caching, or the division into passes.
        """
        return own_events(self.events, index), self.trajectories[index]


@st.composite
def requests(draw, index: int = 0) -> Request:
    prompt = draw(st.lists(st.integers(0, VOCAB - 1), max_size=40))
    return make_request(
        index,
        prompt,
        eos_token_ids=draw(st.sampled_from([(), (EOS,), (EOS, 5)])),
        seed=draw(st.integers(0, 3)),
        max_tokens=draw(st.integers(1, 40)),
        block_length=draw(st.sampled_from([1, 2, 4, 8, 16])),
        steps=draw(st.integers(1, 40)),
        threshold=draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        edit_threshold=draw(st.sampled_from([None, None, 0.0, 0.3, 0.9, 1.0])),
        max_post_steps=draw(st.integers(0, 4)),
        eos_early_stop=draw(st.booleans()),
        ignore_eos=draw(st.booleans()),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.7, 2.0])),
        top_k=draw(st.none() | st.integers(1, VOCAB)),
        top_p=draw(st.none() | st.floats(0.1, 1)),
    )


batches = st.integers(1, 4).flatmap(lambda n: st.tuples(*(requests(i) for i in range(n))))


@examples(25)
@given(batches, st.sampled_from([32, 40, 64, 200]))
def test_recomputing_and_smaller_passes_give_the_same(batch, max_rows) -> None:
    reference = Run(batch, use_kv_cache=False)
    for use_kv_cache in (True, False):
        other = Run(batch, max_rows=max_rows, use_kv_cache=use_kv_cache)
        for request in batch:
            assert other.of(request.id) == reference.of(request.id)


@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), max_size=9),
    length=st.sampled_from([1, 2, 4]),
    edit_threshold=st.sampled_from([0.0, 0.3, 0.6]),
    max_post_steps=st.integers(1, 3),
    seed=st.integers(0, 3),
)
def test_a_block_that_its_last_pass_edited_is_cached_as_it_stays(
    prompt: list[int], length: int, edit_threshold: float, max_post_steps: int, seed: int
) -> None:
    """Later blocks see its final tokens, not those that the last pass over it had."""
    request = make_request(
        prompt=prompt,
        block_length=length,
        threshold=0.0,
        edit_threshold=edit_threshold,
        max_post_steps=max_post_steps,
        max_tokens=5 * length,
        temperature=2.0,
        seed=seed,
        ignore_eos=True,
    )
    assert Run([request]).of(0) == Run([request], use_kv_cache=False).of(0)


@given(batches)
def test_a_pass_that_is_said_to_be_the_last_is(batch) -> None:
    """It is always known where no token is written before its turn and none is rewritten."""
    batch = [replace(each, eos_token_ids=()) for each in batch]
    *before, last = Run(batch, can_mask=False).model.steps
    assert not any(step.is_last for step in before)
    asked = [each.params.diffusion for each in batch]
    if all(each.threshold == 1.0 and each.edit_threshold is None for each in asked):
        assert last.is_last


@given(requests())
def test_a_block_takes_its_steps_at_most_and_those_that_edit(request) -> None:
    run = Run([request])
    num_blocks = request.canvas_length // request.block_length
    per_block = request.steps + 1 + request.max_post_steps
    assert run.finished[0].num_forwards == len(run.trajectories[0]) <= num_blocks * per_block


def test_finished_blocks_are_cached_by_the_next_blocks_first_pass() -> None:
    request = make_request(prompt=range(5), max_tokens=11, threshold=1.0, eos_token_ids=())
    run = Run([request], can_mask=False)
    # 4 prompt tokens and the first block, three masks; then 4 rows a pass, 8 in a first one.
    assert run.model.rows == [8, 4, 4, 8, 4, 4, 4, 8, 4, 4, 4]
    assert [step.index for step in run.model.steps] == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3]


def test_a_block_that_a_pass_left_as_it_was_is_cached_already() -> None:
    request = make_request(
        prompt=range(4), max_tokens=8, threshold=0.0, edit_threshold=0.999, max_post_steps=4
    )
    run = Run([request], can_mask=False)
    rows = run.model.rows
    assert rows[0] == 8 and set(rows[1:]) == {4}


def test_a_long_prompt_is_cached_in_whole_blocks_first() -> None:
    prompt = np.arange(150) % 19
    run = Run([make_request(prompt=prompt, max_tokens=8)], max_rows=64)
    prefills = [event for event in run.events if isinstance(event, Prefill)]
    assert prefills == [Prefill(0, 64, 148), Prefill(0, 128, 148)]
    assert run.model.rows[:3] == [64, 64, 24]
    kinds = [step.kind for step in run.model.steps]
    assert kinds[:3] == [StepKind.PREFILL, StepKind.PREFILL, StepKind.DENOISE]
    assert [step.index for step in run.model.steps[:4]] == [0, 0, 0, 1]


def test_sequences_share_passes_and_count_steps_together() -> None:
    alone = Run([make_request(0, max_tokens=21)])
    run = Run([make_request(index, max_tokens=21) for index in range(3)])
    assert len(run.model.steps) == len(alone.model.steps)
    assert [step.index for step in run.model.steps] == list(range(len(run.model.steps)))
    assert max(run.model.rows) <= 3 * max(alone.model.rows)


def test_a_literal_mask_token_in_a_prompt_is_just_a_token() -> None:
    run = Run([make_request(prompt=[1, MASK, MASK], max_tokens=1)])
    first = next(event for event in run.events if isinstance(event, Draft))
    assert first.tokens[:3] == (1, MASK, MASK) and first.is_masked[:3] == (False,) * 3


def test_predicted_masks_stay_masked_and_the_block_still_ends() -> None:
    kv_cache = make_kv_cache(64)
    decoder = blocks_decoder(Stubborn(kv_cache, 64), kv_cache, MASK, 64)
    events = decoded(decoder, [make_request(prompt=(1, 2, 4, 5), max_tokens=4, eos_token_ids=())])
    drafts = [event for event in events if isinstance(event, Draft)]
    assert [sum(draft.is_masked) for draft in drafts] == [4, 4, 4, 4, 0]
    assert MASK not in events[-1].token_ids


def test_a_stop_is_asked_for_at_each_finished_block() -> None:
    asked = []

    def is_stopped(tokens: Sequence[int]) -> bool:
        asked.append(list(tokens))
        return len(tokens) >= 5

    run = Run([make_request(max_tokens=30, eos_token_ids=(), is_stopped=is_stopped)])
    assert [len(tokens) for tokens in asked] == [1, 5]
    assert run.finished[0].finish_reason == "stop"
    assert list(run.finished[0].token_ids) == asked[-1]


@given(requests())
def test_trajectories_are_those_of_the_published_loop(request) -> None:
    params = replace(request.params, temperature=0.0)
    request = replace(request, params=params, prompt=[t % MASK for t in request.prompt])
    run = Run([request], can_mask=False)
    assert (run.trajectories[0], list(run.finished[0].token_ids)) == published(request)


def published(request: Request) -> tuple[list[list[int]], list[int]]:
    """Token rows into each pass, and the answer: the published loop, everything recomputed.

    One step is that of diffusers' scheduler. For LLaDA2.1 the loop around it is the released
    model's own, which makes `max_post_steps` editing passes at most (diffusers one more) and goes
    on editing where the last scheduled step has filled the block.
    """
    diffusion, num_prompt = request.params.diffusion, len(request.prompt)
    length, eos = request.block_length, [] if request.params.ignore_eos else request.eos_token_ids
    x = np.full(request.canvas_length, MASK)
    x[:num_prompt] = request.prompt
    # To the scheduler a threshold of 0 is none; to the published presets it is "always".
    threshold = diffusion.edit_threshold
    edit_threshold = 1e-9 if threshold == 0 else None if threshold == 1 else threshold
    scheduler = BlockRefinementScheduler()
    scheduler.set_timesteps(min(diffusion.steps, request.params.max_tokens), block_length=length)
    trajectory = []
    for start in range(num_prompt // length * length, len(x), length):
        row, step, num_post = x[: start + length], 0, 0
        while True:
            trajectory.append(row.tolist())
            had_masks = bool((row[start:] == MASK).any())
            output = scheduler.step(
                hash_logits(row, length)[None, start:],
                step,
                torch.from_numpy(row[None, start:].copy()),
                mask_token_id=MASK,
                threshold=diffusion.threshold,
                editing_threshold=edit_threshold,
                prompt_mask=torch.arange(start, start + length) < num_prompt,
            )
            written = (output.transfer_index | output.editing_transfer_index)[0].numpy()
            row[start:] = output.prev_sample[0].numpy()
            step, num_post = step + had_masks, num_post + (not had_masks)
            answer = row[num_prompt:]
            # Where nothing is edited any end token will do: the published loop asks for a new one,
            # and fills the rest of the block where the last gap before an old one was closed.
            is_asked = edit_threshold is None or np.isin(row[start:][written], eos).any()
            if diffusion.eos_early_stop and is_asked and np.isin(answer, eos).any():
                if MASK not in answer[: np.isin(answer, eos).argmax()]:
                    return trajectory, cut(answer, eos, request.params.max_tokens)
            if MASK in row[start:]:
                continue
            may_edit = edit_threshold is not None and num_post < diffusion.max_post_steps
            if not may_edit or (not had_masks and not written.any()):
                break
        if np.isin(answer, eos).any():
            break
    return trajectory, cut(answer, eos, request.params.max_tokens)


def cut(answer: np.ndarray, eos: Iterable[int], max_tokens: int) -> list[int]:
    tokens = answer[:max_tokens].tolist()
    ends = [index for index, token in enumerate(tokens) if token in eos]
    return tokens[: ends[0] + 1] if ends else tokens


@pytest.mark.parametrize("name", ["llada2-a", "llada2-b-bf16"])
def test_the_oracle_is_the_original_model(name) -> None:
    golden = load_file(GOLDENS / name / "forward.safetensors")
    mask = block_causal_mask(0, 24, 8, torch.float32)
    with torch.inference_mode():
        logits = load_oracle(GOLDENS / name)(
            input_ids=golden["input_ids"], attention_mask=mask
        ).logits
    torch.testing.assert_close(logits, golden["logits"], atol=2e-4, rtol=0)
