"""Kept keys that give way to expert slots: pure decisions, in seconds."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from test_kv_cache import Held
from test_kv_pages import PAGE, make_layout, write
from whole import LIMIT_S

from lowtide.engine.running.kept_room import PROMPT_ROWS, KeptRoom
from lowtide.errors import PageError
from lowtide.memory.arena import PagedArena
from lowtide.memory.host_pages import HostPages
from lowtide.memory.kept_rule import KeptRule
from lowtide.memory.kv_cache import KVCache, KVRange
from lowtide.memory.kv_pages import KVPages
from lowtide.memory.pages import PageBudget
from lowtide.policies.kept_keys import (
    PRIOR_CHANCE,
    PRIOR_SEQUENCES,
    YOUNG_PASSES,
    Continuations,
    MemoryPrices,
    gives_way,
)
from lowtide.policies.slot_lending import MOVE_READS

PRICES = MemoryPrices(token_s=0.01, token_bytes=1000, read_s=0.002, slot_bytes=100_000)
"""A slot's memory holds 100 tokens, which take a second to compute again: 500 reads."""

ages = st.integers(0, 1 << 40)
chances = st.floats(0, 1)
prices = st.builds(
    MemoryPrices, st.floats(0, 1), st.integers(1, 1 << 20), st.floats(0, 1), st.integers(1, 1 << 30)
)


def test_a_chance_is_the_share_of_those_of_that_age_that_went_on() -> None:
    seen = Continuations()
    for _ in range(30):
        seen.ended(5, is_continued=True)
        seen.ended(100, is_continued=False)
    weight = PRIOR_SEQUENCES * PRIOR_CHANCE
    assert seen.chance(4) == seen.chance(7) == (30 + weight) / (60 + PRIOR_SEQUENCES)
    assert seen.chance(3) == weight / (60 + PRIOR_SEQUENCES)
    assert seen.chance(8) == seen.chance(63) == weight / (30 + PRIOR_SEQUENCES)
    # What became of those that were given up is not known: nor is their own age a reason.
    assert seen.chance(100) == PRIOR_CHANCE


@given(st.lists(st.tuples(ages, st.booleans()), max_size=60), ages)
def test_a_chance_is_one_and_rises_with_each_that_goes_on(
    ended: Sequence[tuple[int, bool]], age: int
) -> None:
    seen = Continuations()
    for each in ended:
        seen.ended(*each)
    before = seen.chance(age)
    assert 0 < before < 1
    seen.ended(age, is_continued=False)
    assert seen.chance(age) == before
    seen.ended(2 * age + 1, is_continued=False)
    assert (outlived := seen.chance(age)) < before
    seen.ended(age, is_continued=True)
    assert seen.chance(age) > outlived


def test_seconds_decide() -> None:
    """Half a chance of a second against a read of two milliseconds in every second pass."""
    assert PRICES.keys_save_more(0.5, 499, 0.5)
    assert PRICES.keys_save_more(0.5, 502, 0.5)  # what moving the slot costs is not saved
    assert not PRICES.keys_save_more(0.5, 504, 0.5)
    assert not PRICES.keys_save_more(0.25, 300, 0.5)
    assert PRICES.keys_save_more(0.25, 300, 0.25)
    assert PRICES.keys_save_more(1e-9, 1, 1.0)  # a slot for one pass saves nothing
    assert MOVE_READS == 1.5


def test_keys_on_disk_save_no_more_than_reading_them_again() -> None:
    """A read of a slot's memory, if a request goes on from them, against those that it saves."""
    stored = PRICES.of_stored_keys()
    assert stored == pytest.approx(PRICES._replace(token_s=PRICES.read_s / 100))
    assert stored.keys_save_more(0.5, 3, 0.5) and not stored.keys_save_more(0.5, 5, 0.5)
    cheap = PRICES._replace(token_s=1e-9)
    assert cheap.of_stored_keys() == cheap


@given(ages, chances, st.floats(0, 1), prices)
def test_what_saves_more_never_saves_less(
    age: int, chance: float, use: float, p: MemoryPrices
) -> None:
    """Where keys are worth their memory, cheaper slots and likelier turns change nothing."""
    if p.keys_save_more(chance, age, use):
        assert p.keys_save_more(chance, age // 2, use)
        assert p.keys_save_more(chance, age, use / 2)
        assert p.keys_save_more(min(1.0, 2 * chance), age, use)
        assert p._replace(token_s=2 * p.token_s).keys_save_more(chance, age, use)
        assert p._replace(read_s=p.read_s / 2).keys_save_more(chance, age, use)
    assert p.keys_save_more(chance, age, 0.0)


@given(st.booleans(), ages, chances, st.floats(0, 1), st.none() | prices)
def test_the_plan_decides_until_something_is_known(
    is_planned: bool, age: int, chance: float, use: float, p: MemoryPrices | None
) -> None:
    found = gives_way(is_planned, age, chance, use, p)
    if p is None:
        assert found is not is_planned
    elif is_planned and age < YOUNG_PASSES:
        assert not found
    elif use == 0.0:
        assert not found, "slots need no more memory"
    else:
        assert found is not p.keys_save_more(chance, age, use)


# What is told of ranges and passes


class ToldRoom(KeptRoom):
    """A room that is told of each pass by itself; what it counts goes on from pass to pass."""

    num_told, told_s = 0, 0.0

    def tell(self, num_prompt_rows: int, prompt_s: float, num_misses: int, wait_s: float) -> None:
        self.num_told += num_misses
        self.told_s += wait_s
        self.note_pass(num_prompt_rows, prompt_s, self.num_told, self.told_s)


def make_room(slot_use: float | None = 0.5) -> ToldRoom:
    room = ToldRoom(1000, PRICES.token_bytes, PRICES.slot_bytes)
    room.slot_use = None if slot_use is None else lambda num_bytes: slot_use
    return room


def decode(room: ToldRoom, num_passes: int, num_misses: int = 10, each_s: float = 0.002) -> None:
    """Passes without a prompt, each of which waits for reads."""
    for _ in range(num_passes):
        room.tell(0, 0.0, num_misses, num_misses * each_s)


def read_prompt(room: ToldRoom, num_passes: int = 1) -> None:
    for _ in range(num_passes):
        room.tell(512, 5.12, 1000, 5.0)


def kept_range(room: KeptRoom) -> KVRange:
    kv = KVRange(0, 400, 400, 400, num_kept=1)
    room.kept(kv)
    return kv


def test_prices_are_what_passes_took() -> None:
    room = make_room()
    assert room.prices is None
    read_prompt(room)
    assert room.prices is None
    decode(room, 5, num_misses=0)
    assert room.prices is None
    decode(room, 5)
    assert room.prices == pytest.approx(PRICES)
    decode(room, 400, each_s=0.004)
    read_prompt(room)
    assert room.prices == pytest.approx(PRICES._replace(read_s=0.004))
    room.tell(PROMPT_ROWS, 0.64, 0, 0.0)
    assert room.prices == pytest.approx(PRICES._replace(read_s=0.004))
    assert make_room(None).prices is None


def test_within_the_plan_old_keys_go_and_beyond_it_young_ones_stay() -> None:
    room = make_room()
    kv = kept_range(room)
    assert room.gives_way(kv, 1001) and not room.gives_way(kv, 1000), "nothing was measured"
    read_prompt(room)
    decode(room, 10)
    assert not room.gives_way(kv, 10**6)
    decode(room, 230)
    assert not room.gives_way(kv, 1000) and not room.gives_way(kv, 10**6)
    decode(room, 20)  # a quarter of a second of passes each, and more than 250 reads
    assert room.gives_way(kv, 1000) and room.gives_way(kv, 10**6)
    assert room.as_dict() == {"num_kept": 1, "num_kept_given_up": 3}
    room.slot_use = lambda num_bytes: 0.0
    assert not room.gives_way(kv, 10**6)


def test_keys_that_a_file_has_go_sooner() -> None:
    room = make_room()
    read_prompt(room)
    kv = kept_range(room)
    decode(room, YOUNG_PASSES)
    assert not room.gives_way(kv, 1000)
    kv.num_stored = kv.num_kept
    assert room.gives_way(kv, 1000)
    kv.num_kept += 1  # and more has come since
    assert not room.gives_way(kv, 1000)


def test_where_conversations_go_on_keys_stay_for_longer() -> None:
    room = make_room()
    read_prompt(room)
    for _ in range(40):
        kv = kept_range(room)
        decode(room, 300)
        room.ended(kv, is_continued=True)
    kv = kept_range(room)
    decode(room, 400)
    assert not room.gives_way(kv, 1000)
    other = make_room()
    read_prompt(other)
    for _ in range(40):
        kv = kept_range(other)
        decode(other, 600)
        other.ended(kv, is_continued=False)
    kv = kept_range(other)
    decode(other, YOUNG_PASSES - 1)
    assert not other.gives_way(kv, 1000)
    decode(other, 1)
    assert other.gives_way(kv, 1000)


def test_a_copy_is_a_use() -> None:
    room = make_room()
    read_prompt(room)
    kv = kept_range(room)
    decode(room, 300)
    assert room.gives_way(kv, 1000)
    room.copied(kv)
    assert not room.gives_way(kv, 1000)
    for _ in range(40):
        decode(room, 300)
        room.copied(kv)
    decode(room, 400)
    assert not room.gives_way(kv, 1000), "those of that age go on"
    room.ended(dataclasses.replace(kv), is_continued=False)  # of which it was never told


# Whatever is decided


class Drawn(KeptRule):
    """Says anything, and counts what is kept as it is told."""

    def __init__(self, says: Callable[[], bool]) -> None:
        self._says = says
        self.told: list[KVRange] = []

    def kept(self, kv_range: KVRange) -> None:
        assert kv_range not in self.told
        self.told.append(kv_range)

    def copied(self, kv_range: KVRange) -> None:
        self.told.remove(kv_range)
        self.told.append(kv_range)

    def ended(self, kv_range: KVRange, is_continued: bool) -> None:
        self.told.remove(kv_range)

    def gives_way(self, kv_range: KVRange, num_tokens: int) -> bool:
        assert kv_range in self.told and num_tokens >= kv_range.num_usable
        return self._says()


class Machine:
    """A cache whose kept ranges give way as was drawn, in a budget that slots have a part of."""

    def __init__(
        self,
        num_tokens: int,
        budget_pages: int,
        answers: Sequence[bool],
        rule: KeptRule | None = None,
    ) -> None:
        """rule: in place of the drawn one."""
        layout = make_layout(num_tokens, 256)
        self.budget = PageBudget(budget_pages * PAGE * layout.num_parts)
        account = self.budget.open("KV cache")
        pages = HostPages(layout.address_bytes(PAGE), PAGE)
        memory = KVPages((PagedArena(pages, account, layout.num_parts), layout))
        says = itertools.cycle(answers)
        self.rule = Drawn(lambda: next(says))
        self.cache = KVCache(memory.storage, memory, rule=rule or self.rule)
        account.give_way = self.cache.give_way
        self.slots = self.budget.open("expert slots")
        self.slots.give_way = lambda num_bytes: self.slots.give_back(self.slots.num_bytes)
        self.running: list[Held] = []
        self.kept: list[Held] = []
        self.fresh = itertools.count()

    def act(self, action: str, number: int) -> None:
        cache = self.cache
        if action == "allocate" and cache.can_allocate(number):
            self.running.append(Held(cache.allocate(number)))
        elif action == "lend":
            self.slots.draw(self.budget.num_free_bytes)
        elif action == "apply":
            cache.apply_rule(number)
        elif self.running and action == "write":
            write(cache, self.running[number % len(self.running)], number, self.fresh)
        elif self.running and action == "keep":
            each = self.running.pop(number % len(self.running))
            if each.rows.shape[1]:
                self.kept.append(each)
                cache.keep(each.kv, each.rows.shape[1])
            else:
                cache.free(each.kv)
        elif self.running and action == "grow":
            each = self.running[number % len(self.running)]
            cache.grow(each.kv, each.kv.capacity + number)
        elif self.kept and action == "resume" and cache.can_allocate(96):
            each = self.kept[number % len(self.kept)]
            cache.resume(each.kv, each.rows.shape[1], 96)
            self.kept.remove(each)
            self.running.append(each)
        elif self.kept and action == "branch":
            each = self.kept[number % len(self.kept)]
            if cache.can_branch(each.kv, 96):
                made = Held(cache.branch(each.kv, each.rows.shape[1], 96))
                made.rows = each.rows
                self.running.append(made)

    def check(self) -> None:
        """Assert that every range has all that was written to it, or was kept and is gone.

        All ranges have memory, no more than there is, and none lies over another.
        """
        self.kept = [each for each in self.kept if self.cache.is_kept(each.kv)]
        assert set(self.rule.told) == set(self.cache.kept) == {each.kv for each in self.kept}
        assert self.budget.num_free_bytes >= 0
        ends = [0, *(taken.start + taken.capacity for taken in self.cache.taken)]
        starts = [*(taken.start for taken in self.cache.taken), self.cache.num_tokens]
        assert all(end <= start for end, start in zip(ends, starts, strict=True))
        for each, layer in itertools.product([*self.running, *self.kept], (0, 1)):
            assert each.kv in self.cache.taken and each.kv.num_usable >= each.rows.shape[1]
            keys, values = self.cache.read(layer, each.kv, each.rows.shape[1])
            assert torch.equal(keys, each.rows[layer, None, :, None].expand_as(keys))
            assert torch.equal(values, -keys)


acts = st.sampled_from(
    ["allocate", "write", "write", "grow", "keep", "resume", "branch", "apply", "lend"]
)


@examples(60)
@given(
    num_tokens=st.sampled_from([96, 192, 320]),
    budget_pages=st.integers(8, 80),
    answers=st.lists(st.booleans(), min_size=1, max_size=9),
    steps=st.lists(st.tuples(acts, st.integers(1, 90)), max_size=30),
)
def test_whatever_the_rule_says_no_running_range_loses_anything(
    num_tokens: int, budget_pages: int, answers: list[bool], steps: list[tuple[str, int]]
) -> None:
    machine = Machine(num_tokens, budget_pages, answers)
    for action, number in steps:
        with suppress(PageError):  # there is not as much: nothing changes but kept ranges
            machine.act(action, number)
        machine.check()


def test_who_grows_moves_those_behind_it_whoever_gives_way_meanwhile() -> None:
    """A kept range in front goes in the midst of it, since moving wants memory."""
    machine = Machine(320, 80, [False])
    for number in (176, 48, 48):
        machine.act("allocate", number)
    kept, grows, behind = machine.running
    write(machine.cache, kept, 90, machine.fresh)
    machine.act("keep", 0)
    for each in (grows, behind):
        write(machine.cache, each, 48, machine.fresh)
    machine.act("lend", 0)
    machine.slots.give_way = lambda num_bytes: None
    assert machine.cache.grow(grows.kv, 144)
    assert not machine.cache.is_kept(kept.kv)
    machine.check()


def test_another_thread_never_finds_gone_what_is_copied_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(320, 80, [False])
    for action in ("allocate", "write", "keep"):
        machine.act(action, 90)
    [kept], claim = machine.kept, machine.cache.claim
    with ThreadPoolExecutor() as threads:
        asked: list[Future[bool]] = []

        def claiming(kv_range: KVRange, position: int, num_rows: int) -> int:
            """Claims rows of the copy, which are filled next."""
            asked.append(threads.submit(machine.cache.is_kept, kept.kv))
            assert not wait(asked, 0.05).done
            return claim(kv_range, position, num_rows)

        monkeypatch.setattr(machine.cache, "claim", claiming)
        machine.act("branch", 0)
        assert asked[0].result(LIMIT_S)


def test_beside_a_copy_no_more_stays_than_is_planned() -> None:
    machine = Machine(320, 80, [], KeptRoom(planned_tokens=96, token_bytes=1, slot_bytes=1))
    for action in ("allocate", "write", "keep"):
        machine.act(action, 90)
    assert machine.cache.kept
    machine.act("branch", 0)
    assert not machine.cache.kept and machine.running[0].kv.num_usable == 96
