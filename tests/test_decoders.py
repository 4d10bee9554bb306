"""The promises of every decoder to requests in company, over a model of hashes.

Hashes are exact, so everything is compared exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import test_autoregressive as autoregressive
import test_block_diffusion as block_diffusion
import test_masked_diffusion as masked_diffusion
import torch
from examples import examples
from hash_model import MASK, HashModel, is_all_free, make_kv_cache
from hypothesis import given
from hypothesis import strategies as st
from kind_decoders import blocks_decoder, canvas_decoder, causal_decoder
from whole import decoded, own_events

from lowtide.core import CacheMode
from lowtide.decode.request import Committed, Draft, Event, Finished, Request
from lowtide.errors import InternalError, NumericError, PlanError
from lowtide.layers.batch import Batch
from lowtide.memory.kv_cache import KVCache


class Kind(NamedTuple):
    """A decoder, its tests' requests and runs, and rows of passes that it can do with.

    options: how the decoder is made.
    """

    tests: Any
    make: Callable[..., Any]
    max_rows: Sequence[int]
    num_tokens: Sequence[int] = (144, 160, 512)
    options: Mapping[str, object] = {}

    def decoder(self, model: HashModel, kv_cache: KVCache) -> Any:
        arguments = () if self.make is causal_decoder else (MASK,)
        return self.make(model, kv_cache, *arguments, model.max_rows, **self.options)

    def events_alone(self, request: Request) -> list[Event]:
        return own_events(self.tests.Run([request], **self.options).events, request.id)


MASKED = (masked_diffusion, canvas_decoder, (144, 512))
KINDS = {
    "autoregressive": Kind(autoregressive, causal_decoder, (16, 20, 64, 100), (96, 160, 512)),
    "blocks": Kind(block_diffusion, blocks_decoder, (64, 200), (96, 160, 512)),
    "masked": Kind(*MASKED),
    "moved on": Kind(*MASKED, options={"logits_shift": 1, "is_measured_as_drawn": True}),
    "prefix": Kind(*MASKED, options={"cache_mode": CacheMode.PREFIX}),
    "dual": Kind(*MASKED, options={"cache_mode": CacheMode.DUAL, "logits_shift": 1}),
}


each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@each_kind
@given(st.data())
def test_a_batch_decodes_each_request_as_if_alone(kind: Kind, data: st.DataObject) -> None:
    batch = data.draw(kind.tests.batches)
    sizes = data.draw(st.tuples(st.sampled_from(kind.num_tokens), st.sampled_from(kind.max_rows)))
    together = kind.tests.Run(batch, *sizes, **kind.options)
    assert is_all_free(together.kv_cache)
    for request in batch:
        assert together.of(request.id) == kind.tests.Run([request], **kind.options).of(request.id)


@each_kind
@given(st.data())
def test_requests_come_go_and_fail_between_any_two_steps(kind: Kind, data: st.DataObject) -> None:
    """In a cache with room for few, so that ranges move while they are in use."""
    batch = data.draw(kind.tests.batches)
    kv_cache = make_kv_cache(192)
    model = HashModel(kv_cache, 256)
    model.fails_in = data.draw(st.none() | st.integers(0, 20))
    decoder = kind.decoder(model, kv_cache)
    waiting, events, gone = list(batch), [], set()
    while waiting or decoder.has_work:
        if waiting and (not decoder.has_work or data.draw(st.booleans())):
            decoder.add(waiting.pop(0))
        if data.draw(st.integers(0, 9)) == 0:
            index = data.draw(st.integers(0, len(batch) - 1))
            is_there = all(index != request.id for request in waiting)
            is_done = any(isinstance(e, Finished) and e.request == index for e in events)
            expected = is_there and not is_done and index not in gone
            assert decoder.cancel(index) is expected
            gone |= {index} if expected else set()
        if decoder.has_work:
            try:
                events += decoder.step()
            except InternalError:
                model.fails_in = None
    assert is_all_free(kv_cache)
    for request in batch:
        if request.id not in gone:
            assert own_events(events, request.id) == kind.events_alone(request)


@each_kind
@examples(25)
@given(st.data())
def test_what_is_reported_is_consistent(kind: Kind, data: st.DataObject) -> None:
    request = data.draw(kind.tests.requests())
    *events, finished = kind.events_alone(request)
    assert isinstance(finished, Finished)
    committed = [token for e in events if isinstance(e, Committed) for token in e.tokens]
    assert tuple(committed) == finished.token_ids
    eos = () if request.params.ignore_eos else request.eos_token_ids
    assert not set(eos) & set(finished.token_ids[:-1])
    is_stop = finished.token_ids[-1] in eos
    assert finished.finish_reason == ("stop" if is_stop else "length")
    assert len(finished.token_ids) <= request.params.max_tokens
    assert is_stop or len(finished.token_ids) == request.params.max_tokens
    if kind.make is causal_decoder:
        return
    assert MASK not in finished.token_ids
    drafts = [e for e in events if isinstance(e, Draft)]
    assert [draft.num_forwards for draft in drafts] == list(range(1, finished.num_forwards + 1))
    for draft in drafts:
        masked = [t for t, m in zip(draft.tokens, draft.is_masked, strict=True) if m]
        assert masked == [MASK] * len(masked)


@each_kind
def test_closing_after_a_failure_frees_everything(kind: Kind) -> None:
    kv_cache = make_kv_cache(64)
    model = HashModel(kv_cache, 64)
    model.fails_in = 3
    decoder = kind.decoder(model, kv_cache)
    with pytest.raises(InternalError):
        decoded(decoder, [kind.tests.make_request(index, max_tokens=20) for index in range(4)])
    assert is_all_free(kv_cache) and not decoder.has_work


@each_kind
def test_not_finite_logits_end_the_run_with_an_error(kind: Kind) -> None:
    class Broken(HashModel):
        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().logits(hidden).fill_(float("nan"))

    kv_cache = make_kv_cache(64)
    decoder = kind.decoder(Broken(kv_cache, 64), kv_cache)
    with pytest.raises(NumericError, match="not finite"):
        decoded(decoder, [kind.tests.make_request(max_tokens=8)])
    assert is_all_free(kv_cache)


@each_kind
def test_requests_wait_in_order_for_room_for_the_worst_case(kind: Kind) -> None:
    """Of 32 tokens each, in a cache for two of them."""
    asked = [kind.tests.make_request(index, max_tokens=29) for index in range(5)]
    alone = kind.tests.Run(asked[:1], **kind.options)
    run = kind.tests.Run(asked, 64, **kind.options)
    assert list(dict.fromkeys(event.request for event in run.events)) == [0, 1, 2, 3, 4]
    assert max(run.model.rows) <= 2 * max(alone.model.rows)


@each_kind
def test_what_can_never_run_is_refused(kind: Kind) -> None:
    kv_cache = make_kv_cache(64)
    decoder = kind.decoder(HashModel(kv_cache, 512), kv_cache)
    with pytest.raises(PlanError, match="it holds 64"):
        decoder.add(kind.tests.make_request(max_tokens=96))


@each_kind
def test_not_finite_logits_of_one_request_end_it_alone(kind: Kind) -> None:
    class OneBroken(HashModel):
        """All logits of request 1 are NaN."""

        def forward(self, batch: Batch) -> torch.Tensor:
            hidden = super().forward(batch)
            requests = batch.step.rows_of(len(hidden)).request
            hidden[torch.from_numpy(requests == 1)] = -2
            return hidden

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            logits = super().logits(hidden)
            logits[hidden[:, 0] == -2] = float("nan")
            return logits

    kv_cache = make_kv_cache(512)
    decoder = kind.decoder(OneBroken(kv_cache, 256), kv_cache)
    requests = [kind.tests.make_request(i, (1, 2, 4 + i), max_tokens=8) for i in range(3)]
    events, failed = [], []
    for request in requests:
        decoder.add(request)
    while decoder.has_work:
        try:
            events += decoder.step()
        except NumericError:
            failed += [request.id for request in decoder.taking_part]
            assert decoder.cancel(failed[-1], is_sound=False)
    assert failed == [1] and is_all_free(kv_cache)
    for index in (0, 2):
        assert own_events(events, index) == kind.events_alone(requests[index])
