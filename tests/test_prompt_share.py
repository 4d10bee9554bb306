"""Prompts of one caller beside answers of another: passes counted, over a model of hashes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import test_autoregressive
import test_block_diffusion
from hash_model import MASK, VOCAB, HashModel, make_kv_cache
from kind_decoders import blocks_decoder, causal_decoder

from lowtide.core import StepKind
from lowtide.decode.batch_decoder import BatchDecoder
from lowtide.decode.prompt_share import PromptShare
from lowtide.decode.request import Event, Prefill, Request

ROWS = 64
PROMPT = np.arange(600) % VOCAB


class RowTime:
    """A clock by which a pass takes as long as it has rows."""

    def __init__(self, model: HashModel) -> None:
        self._model = model

    def __call__(self) -> float:
        return float(sum(self._model.rows))


def autoregressive(answers: int, caller: int) -> tuple[HashModel, BatchDecoder, list[Event]]:
    kv_cache = make_kv_cache(4096)
    model = HashModel(kv_cache, ROWS)
    decoder = causal_decoder(model, kv_cache, ROWS)
    decoder.prompt_share = PromptShare(RowTime(model))
    for index in range(answers):
        request = test_autoregressive.make_request(index, max_tokens=1000, ignore_eos=True)
        decoder.add(replace(request, caller=index + 1))
    events = decoder.step() if answers else []
    long = test_autoregressive.make_request(100, PROMPT, max_tokens=4)
    decoder.add(replace(long, caller=caller))
    return model, decoder, events


def test_answers_go_on_in_every_pass_and_have_half_of_the_time() -> None:
    model, decoder, _ = autoregressive(answers=2, caller=100)
    first = len(model.rows)
    events = steps_until_prompt_is_read(decoder)
    rows = model.rows[first:]
    with_prompt = [count for count in rows if count > 3]
    without = [count for count in rows if count <= 3]
    assert sum(with_prompt) <= sum(without) + max(with_prompt)
    answered = [event.request for event in events if type(event).__name__ == "Committed"]
    assert answered.count(0) == answered.count(1) == len(rows)


def test_the_requests_of_one_call_do_not_wait_for_each_other() -> None:
    model, decoder, _ = autoregressive(answers=1, caller=1)
    first = len(model.rows)
    steps_until_prompt_is_read(decoder)
    assert all(count > 1 for count in model.rows[first:])


def test_a_long_prompt_and_blocks_of_another_caller_take_turns() -> None:
    kv_cache = make_kv_cache(4096)
    model = HashModel(kv_cache, ROWS, can_mask=False)
    decoder = blocks_decoder(model, kv_cache, MASK, ROWS)
    decoder.prompt_share = PromptShare(RowTime(model))
    options = {"eos_token_ids": (), "threshold": 1.0}
    for index in range(2):
        request = test_block_diffusion.make_request(index, max_tokens=1200, **options)
        decoder.add(replace(request, caller=index + 1))
    decoder.step()
    long = test_block_diffusion.make_request(100, PROMPT, max_tokens=4, **options)
    decoder.add(replace(long, caller=100))
    first = len(model.steps)
    steps_until_prompt_is_read(decoder)
    kinds = [step.kind for step in model.steps[first:]]
    rows = model.rows[first:]
    assert kinds.count(StepKind.PREFILL) == len(PROMPT) // ROWS
    pairs = list(zip(kinds, kinds[1:], strict=False))
    assert (StepKind.PREFILL, StepKind.PREFILL) not in pairs
    reading = [n for n, kind in zip(rows, kinds, strict=True) if kind is StepKind.PREFILL]
    assert sum(reading) <= sum(rows) - sum(reading) + max(reading)


def test_a_lone_long_prompt_is_read_at_once() -> None:
    model, decoder, _ = autoregressive(answers=0, caller=1)
    steps_until_prompt_is_read(decoder)
    assert model.rows == [64] * 9 + [24]


def test_a_request_begins_with_the_first_pass_that_has_rows_of_it() -> None:
    """The second has room in the KV cache at once, and waits for the first one's prompt."""
    model, decoder, _ = autoregressive(answers=0, caller=1)
    decoder.add(test_autoregressive.make_request(101, [1, 2], max_tokens=4))
    begun: list[tuple[int, int]] = []
    decoder.on_begin = lambda events: begun.extend(
        (each.request, len(model.rows)) for each in events
    )
    steps_until_prompt_is_read(decoder)
    assert begun == [(100, 0), (101, 9)]


def steps_until_prompt_is_read(decoder: BatchDecoder) -> list[Event]:
    """Until request 100 has its first token, or a pass later than that could be."""
    events: list[Event] = []
    for _ in range(2000):
        new = decoder.step()
        events += new
        if any(e.request == 100 and not isinstance(e, Prefill) for e in new):
            return events
    raise AssertionError("the prompt was never read")


def test_a_clock_is_asked_only_where_there_is_something_to_share() -> None:
    share = PromptShare(clock=lambda: 1 / 0)
    with share.measured(True):
        pass
    assert not share.holds_back({1}, {1}) and not share.holds_back({1}, set())
    request = test_autoregressive.make_request(0, PROMPT[:50], max_tokens=3)
    kv_cache = make_kv_cache(512)
    decoder = causal_decoder(HashModel(kv_cache, ROWS), kv_cache, ROWS)
    assert isinstance(request, Request)
    decoder.add(request)
    while decoder.has_work:
        decoder.step()
