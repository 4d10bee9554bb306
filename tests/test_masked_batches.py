"""Requests of a bidirectional model that come, go and fail in the midst of others.

Guidance, ends, and the requests that a decoder refuses.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from examples import examples
from hash_model import EOS, MASK, HashModel, Stubborn, make_kv_cache
from hypothesis import given
from kind_decoders import canvas_decoder
from test_masked_diffusion import DREAM, Run, make_request, requests, trajectory
from whole import decoded

from lowtide.core import StepKind
from lowtide.decode.batch_decoder import BatchDecoder
from lowtide.decode.request import Committed, Draft, Finished
from lowtide.layers.batch import Batch


def make_decoder(
    num_tokens: int = 256, max_rows: int = 256, can_mask: bool = True
) -> tuple[BatchDecoder, HashModel]:
    kv_cache = make_kv_cache(num_tokens)
    model = HashModel(kv_cache, max_rows, can_mask)
    return canvas_decoder(model, kv_cache, MASK, max_rows), model


def test_every_sequence_takes_part_whole_and_guided_ones_twice() -> None:
    decoder, model = make_decoder(can_mask=False)
    for index in range(3):
        scale = 1.0 if index == 1 else 0.0
        decoder.add(make_request(index, max_tokens=8, steps=4, cfg_scale=scale))
    while decoder.has_work:
        decoder.step()
    assert model.rows == [11 + 22 + 11] * 4
    assert [(step.kind, step.index) for step in model.steps] == [
        (StepKind.DENOISE, index) for index in range(4)
    ]


def test_alone_steps_count_again_in_every_block() -> None:
    run = Run([make_request(max_tokens=8, block_length=4, steps=4)], can_mask=False)
    assert [step.index for step in run.model.steps] == [0, 1, 0, 1]


def test_logits_are_asked_only_of_what_may_still_change() -> None:
    class Counting(HashModel):
        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            self.num_rows = getattr(self, "num_rows", 0) + len(hidden)
            return super().logits(hidden)

    def num_logits(**params: object) -> int:
        kv_cache = make_kv_cache(256)
        model = Counting(kv_cache, 256, can_mask=False)
        decoded(
            canvas_decoder(model, kv_cache, MASK, 256),
            [make_request(prompt=range(1, 17), max_tokens=64, **params)],
        )
        return model.num_rows

    assert num_logits(block_length=16, steps=16) == 4 * (16 + 12 + 8 + 4)
    assert num_logits(block_length=16, steps=16, cfg_scale=1.0) == 8 * (16 + 12 + 8 + 4)
    assert num_logits(block_length=64, steps=16, remasking="random") == 64


def test_guidance_moves_away_from_what_is_without_the_prompt() -> None:
    """Against logits of both rows, computed apart."""
    request = make_request(prompt=(7, 8, 9), max_tokens=6, steps=6, cfg_scale=2.0)
    batches = []

    class Noting(HashModel):
        def forward(self, batch: Batch) -> torch.Tensor:
            batches.append(batch.token_ids.tolist())
            return super().forward(batch)

    kv_cache = make_kv_cache(64)
    events = decoded(canvas_decoder(Noting(kv_cache, 64), kv_cache, MASK, 64), [request])
    rows = trajectory(request, events, MASK)
    for fed, row in zip(batches, rows, strict=False):
        assert fed == row + [MASK] * 3 + row[3:]
    plain = Run([make_request(prompt=(7, 8, 9), max_tokens=6, steps=6)])
    assert plain.finished[0].token_ids != events[-1].token_ids


def test_a_literal_mask_token_in_a_prompt_is_just_a_token() -> None:
    run = Run([make_request(prompt=[1, MASK, MASK], max_tokens=4, steps=2)])
    assert len(run.finished[0].token_ids) == 4
    assert all(draft.block_start == 3 for draft in run.events if isinstance(draft, Draft))


@pytest.mark.parametrize(
    ("asked", "num_masked"),
    [
        ({"steps": 4}, [8, 8, 8, 8, 0]),
        ({"remasking": "entropy", "steps": 3}, [8, 8, 8, 0]),
        ({"remasking": "origin", "steps": 1}, [8, 0]),
    ],
)
def test_predicted_masks_stay_masked_and_the_answer_still_ends(asked, num_masked) -> None:
    events = stubborn(**asked)
    drafts = [event for event in events if isinstance(event, Draft)]
    assert [sum(draft.is_masked) for draft in drafts] == num_masked
    assert MASK not in events[-1].token_ids


@pytest.mark.parametrize("rule", ["confidence_threshold", "factor"])
def test_rules_without_a_schedule_make_progress_whatever_is_predicted(rule) -> None:
    events = stubborn(remasking=rule)
    drafts = [event for event in events if isinstance(event, Draft)]
    num_masked = [sum(draft.is_masked) for draft in drafts]
    assert num_masked[0] == 8 and num_masked[-1] == 0 and len(num_masked) <= 16
    assert MASK not in events[-1].token_ids


def stubborn(**asked: object) -> list:
    kv_cache = make_kv_cache(64)
    decoder = canvas_decoder(Stubborn(kv_cache, 64), kv_cache, MASK, 64)
    return decoded(decoder, [make_request(max_tokens=8, **asked)])


@examples(25)
@given(requests(eos_token_ids=(EOS, 5, 7, 11), ignore_eos=False))
def test_an_early_stop_changes_nothing_but_the_passes(request) -> None:
    def with_stop(is_early: bool) -> Finished:
        diffusion = replace(request.params.diffusion, eos_early_stop=is_early)
        params = replace(request.params, diffusion=diffusion)
        return Run([replace(request, params=params)]).finished[0]

    early, late = with_stop(True), with_stop(False)
    assert (early.token_ids, early.finish_reason) == (late.token_ids, late.finish_reason)
    assert early.num_forwards <= late.num_forwards


def test_an_answer_ends_with_the_block_that_ends_it() -> None:
    for seed in range(20):
        prompt = (seed % 17, 1, 2)
        run = Run(
            [make_request(prompt=prompt, max_tokens=32, block_length=4, eos_token_ids=(EOS,))]
        )
        finished = run.finished[0]
        if finished.finish_reason == "stop":
            assert finished.token_ids[-1] == EOS
            num_blocks = -(-len(finished.token_ids) // 4)
            assert finished.num_forwards <= num_blocks * 5
            return
    raise AssertionError("no answer ended")


def test_a_stop_is_asked_for_at_each_finished_block() -> None:
    asked = []

    def is_stopped(tokens) -> bool:
        asked.append(len(tokens))
        return len(tokens) >= 8

    request = make_request(max_tokens=16, block_length=4)
    run = Run([replace(request, is_stopped=is_stopped)])
    assert asked == [4, 8]
    assert run.finished[0].finish_reason == "stop"
    assert [len(e.tokens) for e in run.events if isinstance(e, Committed)] == [4, 4]


def test_equal_requests_with_other_seeds_differ() -> None:
    for rule in ("random", "origin"):
        answers = {
            Run([make_request(seed=seed, max_tokens=16, remasking=rule)]).finished[0].token_ids
            for seed in range(4)
        }
        assert len(answers) > 1


def test_steps_of_origin_that_write_nothing_take_no_pass() -> None:
    request = make_request(defaults=DREAM, max_tokens=4, steps=400)
    run = Run([request], can_mask=False)
    assert run.finished[0].num_forwards <= 4
    rows = trajectory(request, run.events, MASK)
    assert all(before != after for before, after in zip(rows, rows[1:], strict=False))
