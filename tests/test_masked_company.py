"""Random models answer alone, at ease, as they do in any company at the least budget.

Every rule, guidance, draws and filters, with streams that begin and are left at random steps.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from examples import examples
from family_models import MASKED, VOCAB, write_model
from hypothesis import given
from hypothesis import strategies as st
from test_masked_diffusion import RULE_FIELDS

from lowtide import LLM, DiffusionParams, SamplingParams
from lowtide.decode.request import Event, Finished
from lowtide.llm import plan_model
from lowtide.params import REMASKING_RULES

CONTEXT = 288
HAS_STEPS = [rule for rule in REMASKING_RULES if rule not in ("factor", "confidence_threshold")]


class Pair(NamedTuple):
    """One model twice: with room for everything, and with as little as does."""

    at_ease: LLM
    tight: LLM


class Asked(NamedTuple):
    prompt: list[int]
    params: SamplingParams


class Answered(NamedTuple):
    token_ids: list[int]
    finish_reason: str
    num_forwards: int


@pytest.fixture(scope="module", params=MASKED)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = write_model(request.param, 7, tmp_path_factory.mktemp("company")).folder
    plan = plan_model(folder, context=CONTEXT)
    with (
        LLM(folder, context=CONTEXT, host_memory=plan.full_bytes) as at_ease,
        LLM(folder, context=CONTEXT, host_memory=plan.minimum_bytes) as tight,
    ):
        yield Pair(at_ease, tight)


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    """Prompts may have any token, that of masks too; answers may be one token."""
    rule = draw(st.sampled_from(REMASKING_RULES))
    num_blocks, block_length = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 7, 16]))
    own: dict[str, Any] = {name: draw(each) for name, each in RULE_FIELDS.get(rule, {}).items()}
    if rule in HAS_STEPS:
        steps_of_block = st.sampled_from([1, 2, 3, 2 * block_length + 3])
        own["steps"] = num_blocks * draw(steps_of_block)
    is_cut = draw(st.booleans())
    diffusion = DiffusionParams(
        remasking=rule,
        block_length=block_length,
        cfg_scale=draw(st.sampled_from([None, 0.0, 0.7, 2.0])),
        eos_early_stop=is_cut,
        **own,
    )
    params = SamplingParams(
        max_tokens=num_blocks * block_length,
        temperature=draw(st.sampled_from([0.0, 0.0, 0.5, 1.5])),
        top_k=draw(st.sampled_from([None, 1, 5])),
        top_p=draw(st.sampled_from([None, 0.3, 0.9])),
        min_p=draw(st.sampled_from([None, None, 0.1])),
        seed=draw(st.integers(0, 4)),
        ignore_eos=not is_cut and draw(st.booleans()),
        diffusion=diffusion,
    )
    ids = random.Random(draw(st.integers(0, 999)))
    return Asked(
        [ids.randrange(VOCAB) for _ in range(draw(st.sampled_from([1, 2, 33, 80])))], params
    )


def alone(llm: LLM, asked: Asked) -> Answered:
    [answer] = llm.generate([asked.prompt], asked.params)
    return Answered(answer.token_ids, answer.finish_reason, answer.usage.forwards)


def in_company(llm: LLM, asked: list[Asked], rng: random.Random) -> list[tuple[int, Answered]]:
    """Answers of those that nobody left, by their place in `asked`."""
    waiting = list(enumerate(asked))
    streams: list[tuple[int, Iterator[Event]]] = []
    answered = []
    while waiting or streams:
        if waiting and (not streams or rng.random() < 0.4):
            index, one = waiting.pop()
            streams.append((index, llm.stream(one.prompt, one.params)))
        place = rng.randrange(len(streams))
        index, stream = streams[place]
        event = next(stream)
        if isinstance(event, Finished):
            reason = event.finish_reason
            answered.append((index, Answered(list(event.token_ids), reason, event.num_forwards)))
        if isinstance(event, Finished) or rng.random() < 0.03:
            stream.close()
            del streams[place]
    return answered


@examples(15)
@given(st.lists(requests(), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_company_and_budget_change_no_word(
    pair: Pair, asked: list[Asked], rng: random.Random
) -> None:
    expected = [alone(pair.at_ease, one) for one in asked]
    for index, answered in in_company(pair.tight, asked, rng):
        assert answered == expected[index]
    assert alone(pair.tight, asked[0]) == expected[0]
