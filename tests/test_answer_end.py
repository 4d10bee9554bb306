"""The end of a diffusion model's answer ends its passes.

Same ids, fewer passes, and no text is shown that the answer will not have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import test_block_diffusion as block
import test_masked_diffusion as masked
from examples import examples
from hash_model import EOS
from hypothesis import given
from hypothesis import strategies as st
from inside import intake_of
from oracle import GOLDENS

from lowtide import LLM, DiffusionParams, SamplingParams
from lowtide.decode.request import Committed, Draft, Event, Finished, Request
from lowtide.serve.frames import FrameWriter

FAMILIES = ("llada2-a", "llada-a", "llada-moe-a", "dream-a")
SORT = [f"Sort {numbers}" for numbers in ("93 21 57 40 12", "5 3", "808 17 90", "61 4 4 23")]


def batches_of(
    requests: Callable[..., st.SearchStrategy[Request]],
) -> st.SearchStrategy[tuple[Request, ...]]:
    """Requests that often have an end, some of which stop elsewhere, too."""
    stops = st.sampled_from([None, None, 5, 11])

    def one(index: int) -> st.SearchStrategy[Request]:
        drawn = st.tuples(requests(index), st.sampled_from([(EOS,), (EOS, 5, 7, 11)]), stops)
        return drawn.map(lambda parts: with_ends(*parts))

    return st.integers(1, 4).flatmap(lambda n: st.tuples(*(one(i) for i in range(n))))


def with_ends(request: Request, ends: tuple[int, ...], stop: int | None) -> Request:
    """`stop` stands for a stop string: an answer is enough once it has this token."""
    is_stopped = None if stop is None else (lambda tokens: stop in tokens)
    return replace(request, eos_token_ids=ends, is_stopped=is_stopped)


def asked(batch: Sequence[Request], **diffusion: Any) -> list[Request]:
    """The same requests under other parameters of diffusion."""
    return [
        replace(each, params=replace(each.params, diffusion=made))
        for each in batch
        for made in [replace(each.params.diffusion, **diffusion)]
    ]


def check_same(early: dict[int, Finished], late: dict[int, Finished]) -> None:
    assert early.keys() == late.keys()
    for index, answer in early.items():
        assert answer.token_ids == late[index].token_ids
        assert answer.finish_reason == late[index].finish_reason
        assert answer.num_forwards <= late[index].num_forwards


@examples(40)
@given(batches_of(block.requests), st.sampled_from([32, 64]), st.sampled_from([None, 1.0]))
def test_blocks_that_end_with_the_answer_have_the_same_ids(batch, max_rows, edit) -> None:
    early = asked(batch, edit_threshold=edit, eos_early_stop=True)
    late = asked(batch, edit_threshold=edit, eos_early_stop=False)
    both = [block.Run(each, max_rows=max_rows).finished for each in (early, late)]
    check_same(*both)


@examples(40)
@given(batches_of(masked.requests), masked.options)
def test_masked_answers_that_end_early_have_the_same_ids(batch, options) -> None:
    early, late = (asked(batch, eos_early_stop=is_early) for is_early in (True, False))
    both = [masked.Run(each, **options).finished for each in (early, late)]
    check_same(*both)


@given(block.requests())
def test_no_pass_follows_the_one_that_wrote_the_end(request) -> None:
    [request] = asked([request], edit_threshold=None, eos_early_stop=True)
    for draft, answer in drafts_of(request, block.Run([request]).events):
        assert not is_answered(draft, request) or draft.num_forwards == answer.num_forwards


@given(masked.requests(eos_token_ids=(EOS, 5, 7), ignore_eos=False, eos_early_stop=True))
def test_no_pass_follows_the_end_of_a_masked_answer(request) -> None:
    for draft, answer in drafts_of(request, masked.Run([request]).events):
        assert not is_answered(draft, request) or draft.num_forwards == answer.num_forwards


def drafts_of(request: Request, events: Sequence[Event]) -> list[tuple[Draft, Finished]]:
    [answer] = [event for event in events if isinstance(event, Finished)]
    return [(event, answer) for event in events if isinstance(event, Draft)]


def is_answered(draft: Draft, request: Request) -> bool:
    """Return True if the block has an end token of the answer and nothing masked before it."""
    ends = () if request.params.ignore_eos else request.eos_token_ids
    first = max(0, len(request.prompt) - draft.block_start)
    for token, masked_here in zip(draft.tokens[first:], draft.is_masked[first:], strict=True):
        if masked_here:
            return False
        if token in ends:
            return True
    return False


@given(block.requests())
def test_drafts_show_what_may_be_in_the_answer(request) -> None:
    [request] = asked([request], edit_threshold=None)
    most = len(request.prompt) + request.max_tokens
    ends = () if request.params.ignore_eos else request.eos_token_ids
    for draft, answer in drafts_of(request, block.Run([request]).events):
        first = max(0, len(request.prompt) - draft.block_start)
        assert first < draft.num_shown <= min(len(draft.tokens), most - draft.block_start)
        shown = draft.tokens[first : draft.num_shown]
        written = [
            token
            for token, is_masked in zip(shown, draft.is_masked[first:], strict=False)
            if not is_masked
        ]
        assert not set(written[:-1]) & set(ends)
        start = draft.block_start + first - len(request.prompt)
        for offset, token in enumerate(shown[: len(answer.token_ids) - start]):
            assert draft.is_masked[first + offset] or token == answer.token_ids[start + offset]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), True),
        (SamplingParams(ignore_eos=True), False),
        (SamplingParams(diffusion=DiffusionParams(eos_early_stop=False)), False),
        (SamplingParams(diffusion=DiffusionParams(eos_early_stop=True)), True),
        (SamplingParams(diffusion=DiffusionParams(edit_threshold=0.5)), False),
        (SamplingParams(diffusion=DiffusionParams(edit_threshold=1.0)), True),
        (SamplingParams(diffusion=DiffusionParams(edit_threshold=0.5, eos_early_stop=True)), True),
    ],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_default_is_early_where_the_answer_is_the_same(name, params, expected) -> None:
    if params.diffusion.edit_threshold is not None and name != "llada2-a":
        return  # refused: these models rewrite nothing
    with LLM(GOLDENS / name) as llm:
        asked = replace(params, max_tokens=32)
        [request] = intake_of(llm).requests([[1, 2, 3]], asked)
    assert request.params.diffusion.eos_early_stop is expected


@pytest.fixture(scope="module")
def demo():
    with LLM("demo:diffusion", context=256, dtype="float32") as llm:
        yield llm


@pytest.mark.parametrize(
    "more",
    [{}, {"n": 3, "temperature": 0.8, "seed": 5}, {"stop": ["4"]}, {"stop": ["21 40", "17"]}],
)
def test_answers_of_the_demo_are_the_same_in_fewer_passes(demo, more) -> None:
    late = DiffusionParams(eos_early_stop=False)
    each = [
        demo.generate(SORT, SamplingParams(max_tokens=60, diffusion=diffusion, **more))
        for diffusion in (DiffusionParams(), late)
    ]
    early, late = ([(c.token_ids, c.text, c.finish_reason) for c in made] for made in each)
    assert early == late
    passes = [sum(completion.usage.forwards for completion in made) for made in each]
    assert passes[0] < passes[1] or "stop" in more


def test_frames_of_the_demo_end_with_the_answer(demo) -> None:
    for text in SORT:
        frames, answer, num_prompt = [], "", len(demo.token_ids(text))
        for event in demo.stream(text, SamplingParams(max_tokens=60)):
            answer += event.text if isinstance(event, Committed | Finished) else ""
            if isinstance(event, Draft):
                frames.append(FrameWriter(demo.tokenizer).frame_of(event, num_prompt))
        assert frames[-1].text and answer.endswith(frames[-1].text)
        assert frames[-1].num_masked == 0
        for frame in frames:
            assert len(frame.tokens) > 0 and all(
                0 <= t.step <= frame.num_forwards for t in frame.tokens
            )
            assert sum(not token.step for token in frame.tokens) == frame.num_masked
            assert all(0 < token.confidence <= 1 for token in frame.tokens)


def test_the_next_turn_computes_the_last_blocks_keys(demo) -> None:
    """Nothing of a block that ended early is kept: the next turn answers as without a cache."""
    messages = [{"role": "user", "content": SORT[0]}]
    [first] = demo.chat(messages)
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": SORT[1]},
    ]
    [on] = demo.chat(messages)
    with LLM("demo:diffusion", context=256, dtype="float32", cache="off") as llm:
        [anew] = llm.chat(messages)
    block_length = demo.config.decoding.block_length
    num_before = len(demo.token_ids([messages[0]])) // block_length * block_length
    assert on.token_ids == anew.token_ids
    assert num_before <= on.usage.cached_tokens < len(demo.token_ids(messages))
