"""Sequences with states: taken up only where these were copied, and never half a pass further.

A model of hashes, whose states hash all tokens in order, beside one that keeps nothing; then a
family made up in this file, whose states decay, as a whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import pytest
import torch
from examples import examples
from hash_model import StatefulHashModel, make_state_cache
from hypothesis import given
from hypothesis import strategies as st
from inside import states_of
from kind_decoders import causal_decoder
from test_kept_sequences import SYSTEM, Case, make_request, run

from lowtide.config import StateArray
from lowtide.core import Reuse
from lowtide.decode import kept_sequences
from lowtide.decode.batch_decoder import BatchDecoder
from lowtide.decode.kept_sequences import MIN_AWAITED_TOKENS
from lowtide.decode.request import Finished, Request
from lowtide.engine.planning.budget_division import SMALL_GROUP_BYTES
from lowtide.engine.running.kept_room import KeptRoom
from lowtide.engine.running.moving_memory import kv_pages, paged_states
from lowtide.errors import InternalError, PlanError
from lowtide.memory.kv_cache import KVCache, KVRange
from lowtide.memory.kv_pages import KVLayout, KVShape
from lowtide.memory.pages import PageBudget
from lowtide.memory.states import RangeStates, StateLayout, StateStore
from lowtide.policies.kept_keys import MemoryPrices

CONTEXT, MAX_ROWS = 1024, 128
CASE = Case(1, Reuse.ON, CONTEXT, MAX_ROWS)


def opened(
    num_slots: int = 16,
    max_rows: int = MAX_ROWS,
    reuse: Reuse = Reuse.ON,
    is_paged: bool = False,
    num_tokens: int = CONTEXT,
) -> tuple[BatchDecoder[Any, Any], StatefulHashModel, KVCache]:
    cache = make_state_cache(num_tokens, num_slots, is_paged)
    model = StatefulHashModel(cache, max_rows)
    return causal_decoder(model, cache, max_rows, reuse=reuse), model, cache


def alone(request: Request, max_rows: int = MAX_ROWS) -> tuple[int, ...]:
    """Its answer with nothing kept."""
    decoder, *_ = opened(max_rows=max_rows, reuse=Reuse.OFF)
    finished: dict[int, Finished] = {}
    decoder.add(request)
    run(decoder, 10_000, finished)
    return finished[request.id].token_ids


def ask(decoder: BatchDecoder[Any, Any], prompt: list[int], max_tokens: int = 8) -> Finished:
    """Ask and compare with the answer of the request alone."""
    finished: dict[int, Finished] = {}
    request = make_request(CASE, prompt, max_tokens, 0)
    decoder.add(request)
    run(decoder, 10_000, finished)
    assert finished[request.id].token_ids == alone(request)
    return finished[request.id]


def check_slots(cache: KVCache) -> None:
    """Each slot is free or of one sequence, and what is kept has states at its end."""
    store = states_of(cache)
    used = [slot for taken in cache.taken for slot in taken.states.slots]
    assert len({*used}) == len(used) == store.num_slots - store.num_free
    for taken in cache.taken:
        states = taken.states
        assert [*states.snapshots] == sorted(states.snapshots)
        is_kept = taken in cache.kept
        assert is_kept == (states.before is None) == (states.after is None)
        if is_kept:
            assert max(states.snapshots) == taken.num_written


# The store


def test_states_begin_as_zeros_and_change_places_at_the_end_of_a_pass() -> None:
    arrays = (StateArray((2, 3)), StateArray((4,), "float64"))
    layout = StateLayout((arrays, (), arrays[:1]), torch.float16, 6)
    memory = torch.full((layout.num_bytes,), 0x7F, dtype=torch.uint8)
    store, shape = StateStore(layout, memory), torch.zeros(1, 2, 1, 64, 4)
    cache = KVCache(shape, states=store)
    kv = cache.allocate(32)
    cache.of_pass(kv, slice(0, 5), 5)
    before, after = cache.states(0, kv)
    assert [x.dtype for x in before] == [torch.float16, torch.float64]
    assert [x.shape for x in after] == [(2, 3), (4,)]
    assert not any(x.any() for x in before)
    for x in after:
        x.fill_(7)
    # A pass that ends nowhere leaves what it found; layer 2 has written nothing in the next.
    cache.of_pass(kv, slice(0, 5), 5)
    assert not any(x.any() for x in cache.states(0, kv).before)
    for x in cache.states(0, kv).after:
        x.fill_(8)
    cache.end_pass([kv])
    with pytest.raises(InternalError, match="3 on cannot follow states of 5 tokens"):
        cache.of_pass(kv, slice(0, 5), 8)
    cache.of_pass(kv, slice(0, 1), 6)
    assert all((x == 8).all() for x in cache.states(0, kv).before)
    assert not any(x.any() for x in cache.states(2, kv).before)
    cache.end_pass([kv])
    cache.end_pass([kv])  # there is no pass
    cache.of_pass(kv, slice(0, 1), 7)
    cache.of_pass(kv, slice(0, 7), 7)  # all anew, as without a KV cache
    assert not any(x.any() for x in cache.states(0, kv).before)
    for num_tokens, layer in ((7, 0), (8, 2), (9, 2), (10, 0)):  # as where few layers are measured
        cache.of_pass(kv, slice(0, 7 if num_tokens == 7 else 1), num_tokens)
        for x in cache.states(layer, kv).after:
            x.fill_(num_tokens)
        cache.end_pass([kv])
    cache.snapshot(kv, may_drop=False)
    other = cache.branch(kv, 10, 16)
    for each in (kv, other):
        cache.of_pass(each, slice(0, 1), 11)
        found = [cache.states(n, each).before for n in (0, 2)]
        assert [[int(x.unique()) for x in layer] for layer in found] == [[10, 10], [9]]
    with pytest.raises(InternalError, match="Layer 1 has no states"):
        cache.states(1, kv)


def test_who_has_no_room_for_states_waits() -> None:
    cache = make_state_cache(256, 3)
    kv = cache.allocate(16)
    assert not cache.can_allocate(16)
    with pytest.raises(PlanError, match="all but 1 of 3 slots.*wait for a sequence"):
        cache.allocate(16)
    cache.free(kv)
    assert cache.can_allocate(16)


def test_snapshots_are_weighed_as_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A range saves its tokens, and costs its keys and its snapshots."""
    room, asked = KeptRoom(1000, 100, 1 << 20, snapshot_bytes=5000), list[int]()
    monkeypatch.setattr(KeptRoom, "prices", MemoryPrices(1e-3, 100, 1e-3, 1 << 20))
    room.slot_use = lambda num_bytes: float(bool(asked.append(num_bytes))) + 0.5
    kv = KVRange(0, 64, num_usable=50, num_kept=1)  # and nothing of it is stored
    room.kept(kv)
    room.num_passes = 2000
    assert not room.gives_way(kv, 50)
    kv.states = RangeStates(snapshots={20: 0, 30: 1, 40: 2})
    assert room.gives_way(kv, 200)
    assert asked == [5000, 20_000]


def test_as_much_as_is_planned_is_held() -> None:
    """Slots that are no whole number of tokens, and keys, count as in the plan together."""
    shape = KVShape.of([(2, 1, 3), None], 256)
    [group], array = shape.groups, (StateArray((5,), "float64"),)
    layout = StateLayout(((), array), torch.int64, 8)
    keys = KVLayout(group, torch.int64)
    assert layout.slot_bytes % keys.token_bytes
    planned_bytes = 256 * keys.token_bytes + layout.num_bytes
    budget = PageBudget(keys.address_bytes(SMALL_GROUP_BYTES) + layout.num_bytes)
    pages = kv_pages(budget, [keys], layout)
    room = KeptRoom(planned_bytes // keys.token_bytes, keys.token_bytes, 1 << 20)
    cache = KVCache(
        pages.storage, pages, rule=room, places=shape.places, states=paged_states(pages, layout)
    )
    for count in range(1, 5):
        kv = cache.allocate(64)
        for stop in (32, 64):
            cache.of_pass(kv, slice(0, 32), stop)
            cache.claim(kv, stop - 32, 32)
            cache.end_pass([kv])
            cache.snapshot(kv, may_drop=False)
        assert len(cache.kept) == count - 1 and cache.num_unused_tokens == 256 - 64 * count
        if count < 4:
            cache.keep(kv, 64)
    assert not states_of(cache).num_free and not room.num_given_up
    pages.close()


# Conversations


def test_a_next_turn_goes_on_where_the_answer_ended() -> None:
    decoder, _, cache = opened()
    text = SYSTEM[:100]
    for turn in range(4):
        found = ask(decoder, text)
        assert found.num_resumed == (len(text) - 8 if turn else 0)
        text = [*text, *found.token_ids, *SYSTEM[turn : turn + 7]]
        check_slots(cache)
    [kept] = cache.kept
    assert [*kept.states.snapshots] == [99, 107, 114, 122, 129, 137, 144, 152]


def test_an_edited_turn_goes_on_before_it() -> None:
    decoder, *_ = opened()
    first = ask(decoder, SYSTEM[:100])
    assert ask(decoder, SYSTEM[:100]).num_resumed == 99
    for number, num_resumed in ((7, 0), (8, 93)):  # where two part a third goes on
        assert ask(decoder, [*SYSTEM[:93], number, number]).num_resumed == num_resumed
    assert ask(decoder, [*SYSTEM[:100], *first.token_ids[:3], 1]).num_resumed == 99
    assert ask(decoder, [*SYSTEM[:60], 7, 7, 7]).num_resumed == 0


def test_what_a_template_drops_of_a_prompt_is_learned() -> None:
    """Each turn ends with twelve tokens that the next one does not have."""
    decoder, *_ = opened()
    text, tail, num_before = SYSTEM[:100], [*range(1, 13)], 0
    for turn in range(4):
        found = ask(decoder, [*text, *tail])
        assert found.num_resumed == num_before
        num_before = len(text) if turn else 0
        text = [*text, *found.token_ids[-3:], *SYSTEM[turn : turn + 7]]


def test_where_two_conversations_part_a_third_goes_on() -> None:
    decoder, *_ = opened(num_slots=30)
    for number, num_resumed in ((1, 0), (2, 0), (3, 150), (4, 150)):
        assert ask(decoder, [*SYSTEM[:150], *[number] * 30]).num_resumed == num_resumed


def test_several_answers_share_the_prompt() -> None:
    decoder, *_ = opened()
    requests = [make_request(CASE, SYSTEM, 8, seed) for seed in range(3)]
    other = make_request(CASE, [*SYSTEM[:150], 5, 5, 5], 8, 0)
    for request in (*requests, other):
        decoder.add(request)
    finished: dict[int, Finished] = {}
    run(decoder, 1000, finished)
    resumed = [finished[request.id].num_resumed for request in (*requests, other)]
    assert resumed[0] == 0 and min(resumed[1:3]) > 199 - MIN_AWAITED_TOKENS
    assert resumed[3] > 150 - MIN_AWAITED_TOKENS
    for request in (*requests, other):
        assert finished[request.id].token_ids == alone(request)


def test_a_long_prompt_can_be_cut_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_sequences, "SNAPSHOT_TOKENS", 192)
    decoder, model, _ = opened()
    text = SYSTEM * 4
    ask(decoder, text)
    assert model.rows[:7] == [*[128] * 6, 800 - 6 * 128]
    for length in (700, 500, 385, 192):
        found = ask(decoder, [*text[:length], 1, 2, 3])
        assert found.num_resumed == length // 192 * 192


def test_exactly_means_at_the_ends_of_whole_passes() -> None:
    decoder, *_ = opened(reuse=Reuse.EXACT)
    ask(decoder, SYSTEM)
    for length, num_resumed in ((200, 128), (140, 128), (128, 128), (127, 0)):
        assert ask(decoder, [*SYSTEM[:length], 1][:200]).num_resumed == num_resumed


def test_chunks_end_at_multiples_of_their_length_after_a_resume() -> None:
    decoder, model, _ = opened()
    first = ask(decoder, SYSTEM[:75])
    del model.rows[:]
    text = [*SYSTEM[:75], *first.token_ids, *SYSTEM]
    ask(decoder, text)
    at = [82]
    for num_rows in model.rows:
        at.append(at[-1] + num_rows)
    assert at == [82, 192, *range(283, 291)]


@pytest.mark.parametrize("num_slots", [16, 4, 2])
def test_a_prompts_new_rows_are_one_pass(num_slots: int) -> None:
    """Wherever states are copied in its midst, and whether there is room for copies or not."""
    decoder, model, cache = opened(num_slots)
    text, num_new = SYSTEM[:20], 19
    for turn, num_added in enumerate((0, 1, 2, 9, 24, 40)):
        del model.rows[:]
        found = ask(decoder, text)
        check_slots(cache)
        assert found.num_resumed == len(text) - 1 - num_new
        assert model.rows == [1 + num_new, *[1] * 7]
        text = [*text, *found.token_ids, *SYSTEM[turn : turn + num_added]]
        num_new = num_added


def test_another_prompt_that_leaves_one_is_one_pass() -> None:
    """Copied are the states where both part, and one token before its end."""
    decoder, model, cache = opened(num_slots=30)
    ask(decoder, [*SYSTEM[:70], *[1] * 30])
    for number in (2, 3):
        del model.rows[:]
        found = ask(decoder, [*SYSTEM[:70], *[number] * 30])
        assert found.num_resumed == (70 if number == 3 else 0)
        assert model.rows == [100 - found.num_resumed, *[1] * 7]
    places = {place for kept in cache.kept for place in kept.states.snapshots}
    assert places == {70, 99, 107}


def test_states_of_a_pass_in_parts_go_through_its_snapshots() -> None:
    """Each part begins with what the one before it wrote, and `before` stays as it was."""
    cache = make_state_cache(256, 8)
    kv, number = cache.allocate(128), 0
    for num_copied in (0, 1, 2):
        start = 10 * num_copied
        ends = (start + 3, start + 5)
        kv.copies_due = dict.fromkeys(ends[:num_copied], False)
        for is_whole in (False, True):
            cache.of_pass(kv, slice(0, 10), start + 10, ends)
            first = cache.states(1, kv)
            assert (first.before[1] == number).all()
            first.after[1].fill_(start + 1)
            for part in (2, 3)[: 2 if is_whole else 1]:
                own = cache.states(1, kv)
                assert (own.before[1] == start + part - 1).all()
                own.after[1].fill_(start + part)
            if not is_whole:  # a layer that takes no notice of its segments is told so
                with pytest.raises(InternalError, match="Layer 1 .* 2 of a sequence's 3 segments"):
                    cache.end_pass([kv])
                kv.copies_due = dict.fromkeys(ends[:num_copied], False)
        if num_copied == 1:  # as where few layers are measured, this one runs in this pass alone
            for part in (1, 2, 3):
                own = cache.states(3, kv)
                assert (own.before[1] == (0 if part == 1 else part + 4)).all()
                own.after[1].fill_(part + 5)
        cache.end_pass([kv])
        number = start + 3
    assert [*kv.states.snapshots] == [13, 23, 25]
    for place, *found in ((13, 11, 6), (23, 21), (25, 22), (30, 23, 8)):
        copy = cache.branch(kv, place, 64)
        cache.of_pass(copy, slice(0, 1), place + 1)
        for layer, own in zip((1, 3), found, strict=False):
            assert (cache.states(layer, copy).before[1] == own).all()
        cache.free(copy)


@pytest.mark.parametrize("max_rows", [16, 48, 64, 80])
def test_chunks_that_have_no_room_end_elsewhere(max_rows: int) -> None:
    """A batch whose answers leave less than a chunk; the states are right all the same."""
    decoder, *_ = opened(num_slots=40, max_rows=max_rows)
    requests = [make_request(CASE, SYSTEM[n : n + 20], 40, 0) for n in range(10)]
    requests.append(make_request(CASE, SYSTEM[3:], 8, 0))
    finished: dict[int, Finished] = {}
    for request in requests:
        decoder.add(request)
        run(decoder, 1, finished)
    run(decoder, 1000, finished)
    for request in requests:
        assert finished[request.id].token_ids == alone(request)


# Faults


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("num_passes", [0, 1, 2, 4, 7])
def test_a_pass_that_fails_in_any_layer_leaves_each_state(layer: int, num_passes: int) -> None:
    """The pass is run once more, and two sequences go on as if nothing had been."""
    decoder, model, cache = opened()
    requests = [make_request(CASE, SYSTEM[n:], 12, n) for n in (0, 40)]
    finished: dict[int, Finished] = {}
    for request in requests:
        decoder.add(request)
    run(decoder, num_passes, finished)
    model.fails_at = layer
    with pytest.raises(InternalError, match="as told"):
        decoder.step()
    run(decoder, 1000, finished)
    for request in requests:
        assert finished[request.id].token_ids == alone(request)
    check_slots(cache)


def test_who_is_cancelled_after_a_failed_pass_can_be_taken_up() -> None:
    decoder, model, _ = opened()
    request = make_request(CASE, SYSTEM, 12, 0)
    decoder.add(request)
    run(decoder, 5, {})
    model.fails_at = 3
    with suppress(InternalError):
        decoder.step()
    decoder.cancel(request.id)
    assert ask(decoder, SYSTEM).num_resumed == 199


# Whatever comes


class Drawn:
    """Conversations over one decoder, their answers beside those of requests alone."""

    def __init__(self, rng: Random, opens: Callable[..., Any]) -> None:
        self.rng = rng
        self.max_rows = rng.choice((16, 48, 64, 128, 256))
        reuse = rng.choice((Reuse.ON, Reuse.ON, Reuse.EXACT))
        self.decoder, self.model, self.cache = opens(
            num_slots=rng.choice((2, 3, 4, 6, 12, 24)),
            max_rows=self.max_rows,
            reuse=reuse,
            is_paged=rng.random() < 0.5,
            num_tokens=rng.choice((288, 512, CONTEXT)),
        )
        self.asked: list[Request] = []
        self.finished: dict[int, Finished] = {}
        self.num_resumed = 0

    def take_turn(self) -> None:
        rng, prompt = self.rng, self.prompt()
        for sample in range(rng.choice((1, 1, 1, 2, 3, 8))):
            self.asked.append(make_request(CASE, prompt, rng.randint(1, 12), sample))
            self.decoder.add(self.asked[-1])
        self.run(rng.choice((0, 1, 3, 1000)))
        if rng.random() < 0.2:
            self.model.fails_at = rng.randrange(4)
        if rng.random() < 0.15:
            self.decoder.cancel(rng.choice(self.asked).id)
        if rng.random() < 0.1:
            self.decoder.forget()

    def prompt(self) -> list[int]:
        rng = self.rng
        added = [rng.randrange(18) for _ in range(rng.randint(1, 24))]
        before = [request for request in self.asked if request.id in self.finished]
        if not before or rng.random() < 0.2:
            return SYSTEM[: rng.randint(10, 150)] + added
        behind = rng.choice(before)
        text = [*behind.prompt, *self.finished[behind.id].token_ids]
        text = text[: max(1, len(text) - rng.choice((0, 0, 0, 1, 3, 7, 9, 20, 60)))]
        return text[: 260 - len(added)] + added

    def run(self, num_passes: int) -> None:
        for _ in range(num_passes):
            if not self.decoder.has_work:
                return
            with suppress(InternalError):
                for event in self.decoder.step():
                    if isinstance(event, Finished):
                        self.finished[event.request] = event
            check_slots(self.cache)

    def end(self) -> None:
        self.run(100_000)
        for request in self.asked:
            if found := self.finished.get(request.id):
                assert found.token_ids == alone(request, self.max_rows)
                self.num_resumed += found.num_resumed > 0
        self.decoder.close()
        assert not self.cache.taken
        check_slots(self.cache)


@examples(60)
@given(st.integers(0, 1 << 20))
def test_drawn_conversations_are_those_of_a_twin_that_keeps_nothing(seed: int) -> None:
    rng = Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_sequences, "SNAPSHOT_TOKENS", rng.choice((64, 128, 2048)))
        drawn = Drawn(rng, opened)
        for _ in range(rng.randint(2, 8)):
            drawn.take_turn()
        drawn.end()


def test_drawn_conversations_are_often_taken_up() -> None:
    num_resumed = num_asked = 0
    for seed in range(12):
        drawn = Drawn(Random(seed), lambda **k: opened(**{**k, "num_slots": 24}))
        for _ in range(6):
            drawn.take_turn()
        drawn.end()
        num_resumed, num_asked = num_resumed + drawn.num_resumed, num_asked + len(drawn.finished)
    assert num_resumed > 0.3 * num_asked
