"""Keys that later requests take over from earlier ones: the words of a run that computes all."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
from hash_model import MASK, HashModel, make_kv_cache
from kind_decoders import blocks_decoder, causal_decoder

from lowtide import DiffusionParams, SamplingParams
from lowtide.core import Reuse
from lowtide.decode.batch_decoder import BatchDecoder
from lowtide.decode.kept_sequences import MIN_AWAITED_TOKENS
from lowtide.decode.logits import Model
from lowtide.decode.request import Finished, Request
from lowtide.memory.kv_cache import KVCache

SYSTEM = [(5 * i + i // 7) % MASK for i in range(200)]
"""Tokens that conversations begin with."""


class Case(NamedTuple):
    """A decoder and what it has room for."""

    block_length: int  # 1: autoregressive
    reuse: Reuse
    num_tokens: int
    max_rows: int


def make_decoder(case: Case, reuse: Reuse) -> tuple[BatchDecoder, KVCache]:
    kv_cache = make_kv_cache(case.num_tokens)
    return decoder_over(HashModel(kv_cache, case.max_rows), kv_cache, case, reuse), kv_cache


def decoder_over(
    model: Model, kv_cache: KVCache, case: Case, reuse: Reuse, mask: int = MASK
) -> BatchDecoder:
    if case.block_length == 1:
        return causal_decoder(model, kv_cache, case.max_rows, reuse=reuse)
    return blocks_decoder(model, kv_cache, mask, case.max_rows, reuse=reuse)


def make_request(case: Case, prompt: list[int], max_tokens: int, seed: int) -> Request:
    diffusion = DiffusionParams()
    if case.block_length > 1:
        diffusion = DiffusionParams(block_length=case.block_length, steps=2, threshold=0.9)
    temperature = 1.0 if seed else 0.0
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, diffusion=diffusion)
    return Request(prompt=prompt, params=params, seed=seed)


def run(decoder: BatchDecoder, num_passes: int, finished: dict[int, Finished]) -> None:
    for _ in range(num_passes):
        if not decoder.has_work:
            return
        for event in decoder.step():
            if isinstance(event, Finished):
                finished[event.request] = event


def check_ranges(kv_cache: KVCache) -> None:
    """No two overlap, and those of running sequences are not kept ones."""
    ends = 0
    for taken in kv_cache.taken:
        assert taken.start >= ends and taken.num_written <= taken.capacity
        ends = taken.start + taken.capacity
    assert ends <= kv_cache.num_tokens
    assert all(kept in kv_cache.taken for kept in kv_cache.kept)


def ask(decoder: BatchDecoder, case: Case, prompt: list[int], max_tokens: int = 8) -> Finished:
    """A request's end, alone."""
    finished: dict[int, Finished] = {}
    request = make_request(case, prompt, max_tokens, 0)
    decoder.add(request)
    run(decoder, 1000, finished)
    return finished[request.id]


AUTOREGRESSIVE = Case(1, Reuse.ON, 1024, 64)
BLOCKS = Case(4, Reuse.ON, 1024, 64)


@pytest.mark.parametrize("case", [AUTOREGRESSIVE, BLOCKS])
def test_who_finds_no_room_beside_a_job_waits_for_it(case: Case) -> None:
    """Such as logits of a long text: also a request that was there before, and has to grow."""
    decoder, kv_cache = make_decoder(case, Reuse.ON)
    other, finished = make_request(case, SYSTEM, 600, 0), dict[int, Finished]()
    decoder.add(other)
    run(decoder, 1, finished)
    job = kv_cache.allocate(kv_cache.num_free_tokens)
    run(decoder, 300, finished)
    assert decoder.has_work and not decoder.running and not finished
    kv_cache.free(job)
    run(decoder, 1000, finished)
    alone, _ = make_decoder(case, Reuse.ON)
    expected = dict[int, Finished]()
    alone.add(other)
    run(alone, 1000, expected)
    assert finished[other.id].token_ids == expected[other.id].token_ids


def test_what_was_computed_before_a_switch_is_not_taken_over_after_it() -> None:
    """Where the policy before it changes words."""
    for is_mixed in (False, True):
        decoder, _ = make_decoder(AUTOREGRESSIVE, Reuse.ON)
        decoder.add(make_request(AUTOREGRESSIVE, SYSTEM, 8, 0))
        run(decoder, 5, {})
        decoder.forget(is_mixed)
        num_resumed = ask(decoder, AUTOREGRESSIVE, SYSTEM).num_resumed
        assert num_resumed == (0 if is_mixed else len(SYSTEM) - 1)
        assert ask(decoder, AUTOREGRESSIVE, SYSTEM).num_resumed == len(SYSTEM) - 1


def test_a_next_turn_computes_only_what_is_new_and_nothing_moves() -> None:
    decoder, kv_cache = make_decoder(AUTOREGRESSIVE, Reuse.ON)
    text = SYSTEM[:50]
    for turn in range(5):
        first = ask(decoder, AUTOREGRESSIVE, text)
        assert first.num_resumed == (len(text) - 11 if turn else 0)
        text = [*text, *first.token_ids, *SYSTEM[turn : turn + 10]]
        [kept] = kv_cache.taken
        assert kept.start == 0


def test_blocks_go_on_at_their_borders() -> None:
    decoder, _ = make_decoder(BLOCKS, Reuse.ON)
    first = ask(decoder, BLOCKS, SYSTEM[:41])
    again = ask(decoder, BLOCKS, [*SYSTEM[:41], *first.token_ids, 1, 2, 3])
    assert again.num_resumed % 4 == 0 and again.num_resumed >= 40
    other_blocks = BLOCKS._replace(block_length=6)
    assert ask(decoder, other_blocks, SYSTEM[:60]).num_resumed == 0


@pytest.mark.parametrize("case", [AUTOREGRESSIVE, BLOCKS])
def test_several_answers_compute_their_prompt_once(case: Case) -> None:
    decoder, _ = make_decoder(case, Reuse.ON)
    requests = [make_request(case, SYSTEM, 8, seed) for seed in (0, 1, 2)]
    other = make_request(case, [7] * 20, 4, 0)
    for request in (*requests, other):
        decoder.add(request)
    decoder.step()
    assert len(decoder.running) == 2  # the first, and what has nothing to wait for
    finished: dict[int, Finished] = {}
    run(decoder, 1000, finished)
    resumed = [finished[request.id].num_resumed for request in (*requests, other)]
    assert resumed[0] == resumed[3] == 0
    assert len(SYSTEM) - MIN_AWAITED_TOKENS < min(resumed[1:3])


@pytest.mark.parametrize("block_length", [1, 4])
@pytest.mark.parametrize("reuse", [Reuse.ON, Reuse.OFF])
def test_room_is_taken_as_it_is_written(block_length: int, reuse: Reuse) -> None:
    """Each of three answers could take all the room there is.

    Two begin together, and the later one pauses where it runs out.
    """
    case = Case(block_length, reuse, 1024, 64)
    decoder, kv_cache = make_decoder(case, reuse)
    requests = [make_request(case, [number] * 60, 960, 0) for number in (1, 2, 3)]
    for request in requests:
        decoder.add(request)
    finished: dict[int, Finished] = {}
    run(decoder, 3, finished)
    assert len(decoder.running) == 2
    run(decoder, 100_000, finished)
    assert kv_cache.can_allocate(1024)
    for request in requests:
        alone, _ = make_decoder(case, Reuse.OFF)
        alone.add(request)
        expected: dict[int, Finished] = {}
        run(alone, 100_000, expected)
        assert finished[request.id] == expected[request.id]


@pytest.mark.parametrize("case", [AUTOREGRESSIVE, BLOCKS])
def test_the_sequence_that_came_last_pauses(case: Case) -> None:
    decoder, _ = make_decoder(case, Reuse.ON)
    requests = [make_request(case, [number] * 60, 900, 0) for number in (1, 2)]
    for request in requests:
        decoder.add(request)
    decoder.step()
    while len(decoder.running) == 2:
        decoder.step()
    assert {event.request for _ in range(3) for event in decoder.step()} == {requests[0].id}
    decoder.close()


def test_a_paused_request_can_be_cancelled() -> None:
    decoder, kv_cache = make_decoder(AUTOREGRESSIVE, Reuse.ON)
    requests = [make_request(AUTOREGRESSIVE, [number] * 60, 960, 0) for number in (1, 2)]
    for request in requests:
        decoder.add(request)
    decoder.step()
    while len(decoder.running) == 2:
        decoder.step()
    assert decoder.cancel(requests[1].id) and not decoder.cancel(requests[1].id)
    assert decoder.cancel(requests[0].id) and not decoder.has_work
    assert kv_cache.can_allocate(1024)


def test_a_shared_beginning_pushes_no_conversation_out() -> None:
    decoder, kv_cache = make_decoder(AUTOREGRESSIVE, Reuse.ON)
    own = [*SYSTEM[:100], *range(18)]
    answer = ask(decoder, AUTOREGRESSIVE, own).token_ids
    for number in range(20):  # far more than there is room for
        other = [*SYSTEM[:100], *[number % 18] * 12]
        assert ask(decoder, AUTOREGRESSIVE, other).num_resumed >= 100
        if number == 3:
            [*own] = [*own, *answer, 7]
            found = ask(decoder, AUTOREGRESSIVE, own)
            assert found.num_resumed == len(own) - 2  # all but the last answer's end, and 7
    assert kv_cache.num_free_tokens == kv_cache.num_tokens


def test_the_conversation_that_was_longest_not_used_goes_first() -> None:
    case = AUTOREGRESSIVE._replace(num_tokens=352)
    decoder, _ = make_decoder(case, Reuse.ON)
    texts = [[number] * 90 for number in (1, 2, 3)]
    for text in texts:
        ask(decoder, case, text)
    assert ask(decoder, case, texts[0]).num_resumed == 89
    ask(decoder, case, [4] * 90)  # the second goes
    assert [ask(decoder, case, texts[i]).num_resumed for i in (0, 2, 1)] == [89, 89, 0]


def test_a_request_finds_all_the_room_there_is() -> None:
    decoder, kv_cache = make_decoder(AUTOREGRESSIVE, Reuse.ON)
    for number in range(8):
        ask(decoder, AUTOREGRESSIVE, [number] * 120)
    assert kv_cache.can_allocate(1024)
    assert ask(decoder, AUTOREGRESSIVE, [9] * 1000, 24).num_resumed == 0


def test_exactly_means_whole_passes_of_a_request_alone() -> None:
    case = AUTOREGRESSIVE._replace(reuse=Reuse.EXACT)
    decoder, _ = make_decoder(case, Reuse.EXACT)
    text = SYSTEM[:150]
    ask(decoder, case, text)
    assert ask(decoder, case, text).num_resumed == 128
    assert ask(decoder, case, text[:129]).num_resumed == 128
    assert ask(decoder, case, text[:128]).num_resumed == 64
    answer = ask(decoder, case, text, 60).token_ids  # a token in each pass
    assert len(text) + len(answer) > 192
    assert ask(decoder, case, [*text, *answer, 5]).num_resumed == 128
    finished: dict[int, Finished] = {}
    for number in (0, 1):  # in company nothing is exact
        decoder.add(make_request(case, [number + 3] * 150, 4, number))
    run(decoder, 1000, finished)
    assert ask(decoder, case, [4] * 150).num_resumed == 0


def test_what_a_failed_pass_left_is_not_taken_over() -> None:
    kv_cache = make_kv_cache(1024)
    model = HashModel(kv_cache, 64)
    decoder = causal_decoder(model, kv_cache, 64, reuse=Reuse.ON)
    request = make_request(AUTOREGRESSIVE, SYSTEM[:100], 4, 0)
    decoder.add(request)
    decoder.step()
    decoder.cancel(request.id, is_sound=False)
    assert not kv_cache.taken
    decoder.add(dataclasses.replace(request, id=request.id))
    decoder.step()
    decoder.cancel(request.id)
    assert ask(decoder, AUTOREGRESSIVE, SYSTEM[:100]).num_resumed == 64
