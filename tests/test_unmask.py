"""The rules for one block, against diffusers' scheduler."""

from __future__ import annotations

import numpy as np
import torch
from diffusers import BlockRefinementScheduler
from hypothesis import given
from hypothesis import strategies as st

from lowtide.decode.unmask import choose_edits, choose_fills, num_scheduled

MASK = 30
SCHEDULER = BlockRefinementScheduler()


def as_mask(text: str) -> np.ndarray:
    return np.array([letter == "#" for letter in text])


def test_the_schedule_spreads_the_block_over_the_steps() -> None:
    assert [num_scheduled(8, 3, step) for step in range(4)] == [3, 3, 2, None]
    assert [num_scheduled(4, 6, step) for step in range(7)] == [1, 1, 1, 1, 0, 0, None]


@given(st.integers(1, 64), st.integers(1, 80))
def test_the_schedule_is_the_published_one_and_fills_the_block(block_length, steps) -> None:
    schedule = [num_scheduled(block_length, steps, step) for step in range(steps)]
    assert schedule == SCHEDULER.get_num_transfer_tokens(block_length, steps).tolist()
    assert sum(schedule) == block_length


def test_the_threshold_itself_is_not_above_it() -> None:
    confidence = np.full(4, 0.3, np.float32)  # 0.3 rounds up
    assert choose_fills(as_mask("####"), confidence, 1, 0.3).tolist() == [True] + 3 * [False]


def test_after_the_schedule_everything_is_written() -> None:
    fills = choose_fills(as_mask("#.#."), np.zeros(4, np.float32), None, 0.9)
    assert fills.tolist() == [True, False, True, False]


@given(
    seed=st.integers(0, 10**6),
    block_length=st.sampled_from([1, 4, 8, 32]),
    steps=st.integers(1, 40),
    threshold=st.floats(0, 1),
    edit_threshold=st.none() | st.floats(0.01, 1),
    data=st.data(),
)
def test_one_step_is_that_of_the_scheduler(
    seed, block_length, steps, threshold, edit_threshold, data
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(block_length, MASK + 1, generator=generator)
    logits[:, MASK] = -100  # the mask id as a prediction is another test's
    tokens = torch.randint(0, MASK, (block_length,), generator=generator)
    num_prompt = data.draw(st.integers(0, block_length - 1))
    is_prompt = torch.arange(block_length) < num_prompt
    is_masked = (torch.rand(block_length, generator=generator) < 0.5) & ~is_prompt
    tokens[is_masked] = MASK
    step = data.draw(st.integers(0, steps - 1))
    SCHEDULER.set_timesteps(steps, block_length=block_length)
    expected = SCHEDULER.step(
        logits[None],
        step,
        tokens[None],
        mask_token_id=MASK,
        threshold=threshold,
        editing_threshold=edit_threshold,
        prompt_mask=is_prompt,
    )
    candidates = expected.sampled_tokens[0].numpy()
    confidence = expected.sampled_probs[0].numpy()
    fills = choose_fills(
        is_masked.numpy(), confidence, num_scheduled(block_length, steps, step), threshold
    )
    assert fills.tolist() == expected.transfer_index[0].tolist()
    if edit_threshold is not None:
        editable = (~is_masked & ~is_prompt).numpy()
        edits = choose_edits(tokens.numpy(), editable, candidates, confidence, edit_threshold, MASK)
        assert edits.tolist() == expected.editing_transfer_index[0].tolist()


def test_an_edit_never_brings_a_mask_back() -> None:
    tokens, candidates = np.array([1, 2, 3]), np.array([MASK, 5, 3])
    edits = choose_edits(tokens, as_mask("###"), candidates, np.ones(3, np.float32), 0.0, MASK)
    assert edits.tolist() == [False, True, False]
