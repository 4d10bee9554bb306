"""Keys and values that are kept while a block is filled, over a model of hashes.

Held against the hashes: the keys that a step finds, that company changes nothing, and the cases in
which kept keys are no approximation.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from examples import examples
from hash_model import MASK, HashModel, make_kv_cache
from hypothesis import given
from hypothesis import strategies as st
from kind_decoders import canvas_decoder
from test_masked_diffusion import DREAM, Run, batches, make_request, options, requests
from whole import decoded

from lowtide.core import CacheMode
from lowtide.decode.request import Finished, Request
from lowtide.errors import PageError
from lowtide.memory.kv_cache import KVRange

APPROXIMATE = [CacheMode.PREFIX, CacheMode.DUAL]
modes = st.sampled_from(APPROXIMATE)


@given(requests(), options, modes)
def test_one_layer_finds_what_it_would_compute(request, options, mode) -> None:
    """Its keys are those of tokens, and outside the active block none is written."""
    exact = Run([request], num_layers=1, **options)
    assert Run([request], num_layers=1, cache_mode=mode, **options).events == exact.events


@examples(50)
@given(requests(), options, modes)
def test_blocks_of_one_step_are_exact(request, options, mode) -> None:
    diffusion = request.params.diffusion
    if diffusion.steps is None or diffusion.remasking == "confidence_threshold":
        return
    num_blocks = -(-request.params.max_tokens // diffusion.block_length)
    diffusion = replace(diffusion, steps=num_blocks)
    request = replace(request, params=replace(request.params, diffusion=diffusion))
    exact = Run([request], can_mask=False, **options)
    assert Run([request], can_mask=False, cache_mode=mode, **options).events == exact.events


@examples(50)
@given(requests(), options)
def test_nothing_lies_behind_a_block_that_is_the_whole_answer(request, options) -> None:
    diffusion = replace(request.params.diffusion, block_length=request.params.max_tokens)
    request = replace(request, params=replace(request.params, diffusion=diffusion))
    prefix, dual = (Run([request], cache_mode=mode, **options) for mode in APPROXIMATE)
    assert prefix.events == dual.events and prefix.model.rows == dual.model.rows


def three_blocks(**params: object) -> Request:
    return make_request(
        prompt=(7, 8, 9, 10, 11), max_tokens=12, block_length=4, steps=6, defaults=DREAM, **params
    )


@pytest.mark.parametrize(
    ("mode", "shift", "rows"),
    [
        (CacheMode.EXACT, 0, [17, 17, 17, 17, 17, 17]),
        (CacheMode.PREFIX, 0, [17, 12, 17, 8, 17, 4]),
        (CacheMode.DUAL, 0, [17, 4, 17, 4, 17, 4]),
        (CacheMode.PREFIX, 1, [17, 13, 17, 9, 17, 5]),
        (CacheMode.DUAL, 1, [17, 5, 17, 5, 17, 5]),
    ],
)
def test_only_a_blocks_first_pass_is_whole(mode, shift, rows) -> None:
    request = three_blocks(remasking="maskgit_plus")
    run = Run([request], can_mask=False, cache_mode=mode, logits_shift=shift)
    assert run.model.rows == rows
    guided = Run([three_blocks(remasking="maskgit_plus", cfg_scale=1.0)], cache_mode=mode)
    assert guided.model.rows[0] == 34


def test_modes_are_approximations() -> None:
    answers = [
        Run([three_blocks(remasking="low_confidence")], can_mask=False, cache_mode=mode)
        .finished[0]
        .token_ids
        for mode in CacheMode
    ]
    assert len(set(answers)) == 3


@pytest.mark.parametrize("mode", APPROXIMATE)
def test_what_is_kept_moves_with_its_range(mode) -> None:
    """The first request leaves a gap, so that the second has to move for the third, in a block."""
    kv_cache = make_kv_cache(80)
    batch = [
        make_request(index, prompt=range(8), max_tokens=length - 8, steps=steps)
        for index, (length, steps) in enumerate([(16, 1), (48, 16), (32, 4)])
    ]
    decoder = canvas_decoder(HashModel(kv_cache, 96, False), kv_cache, MASK, 96, cache_mode=mode)
    for request in batch:
        decoder.add(request)
    second = []
    while decoder.has_work:
        second += [event for event in decoder.step() if event.request == 1]
    assert second == Run([batch[1]], can_mask=False, cache_mode=mode).of(1)


@examples(50)
@given(batches, options, modes, st.lists(st.booleans(), min_size=1, max_size=9))
def test_who_pauses_for_want_of_memory_writes_the_same_words(
    batch, options, mode, refusals
) -> None:
    """Its block begins again: what its first pass kept is gone."""
    kv_cache = make_kv_cache(512)
    model = HashModel(kv_cache, 512, False)
    decoder = canvas_decoder(model, kv_cache, MASK, 512, cache_mode=mode, **options)
    is_refused, prepare = itertools.cycle(refusals), kv_cache.prepare

    def prepare_or_refuse(kv_range: KVRange, num_tokens: int) -> None:
        if len(decoder.running) > 1 and next(is_refused):
            raise PageError("as drawn")
        prepare(kv_range, num_tokens)

    kv_cache.prepare = prepare_or_refuse
    ended = {e.request: e for e in decoded(decoder, batch) if isinstance(e, Finished)}
    for request in batch:
        alone = Run([request], can_mask=False, cache_mode=mode, **options).finished[request.id]
        assert ended[request.id].token_ids == alone.token_ids
        assert ended[request.id].finish_reason == alone.finish_reason
