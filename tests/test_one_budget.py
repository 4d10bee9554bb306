"""A KV cache, a workspace and expert slots under one budget: nobody ever has more than there is."""

from __future__ import annotations

import numpy as np
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from test_paged_arena import physical_bytes

from lowtide.errors import PageError
from lowtide.experts.paged_slots import PagedSlots
from lowtide.experts.slots import SlotLedger
from lowtide.memory.arena import PagedArena
from lowtide.memory.chunking import Counts
from lowtide.memory.host_pages import HostPages
from lowtide.memory.kv_cache import KVCache, KVRange, storage_shape
from lowtide.memory.kv_pages import KVLayout, KVPages
from lowtide.memory.pages import PageBudget
from lowtide.memory.pass_planner import PassPlan
from lowtide.memory.pass_plans import PagedRoom
from lowtide.memory.planner import ArenaPlaces

PAGE = 4096
NUM_TOKENS, NUM_SLOTS, SLOT_BYTES = 96, 12, 3 * PAGE // 2
WORKSPACE_BYTES = 24 * PAGE


class Machine:
    """Memory for a cache, slots and passes, counted at every single call of the system.

    It has 96 tokens in two parts of 24 pages, twelve slots of a page and a half, and passes of up
    to 24 pages.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.held_bytes = 0
        machine = self

        class Counting(HostPages):
            def commit(self, start: int, stop: int) -> None:
                super().commit(start, stop)
                machine.held_bytes += stop - start
                assert machine.held_bytes <= budget_bytes

            def release(self, start: int, stop: int) -> None:
                super().release(start, stop)
                machine.held_bytes -= stop - start

        self.budget = PageBudget(budget_bytes)
        self.account = self.budget.open("expert slots")
        self.account.give_way = self.give_way
        layout = KVLayout(storage_shape(1, 1, 256, NUM_TOKENS), torch.float32)
        pages = Counting(layout.address_bytes(PAGE), PAGE)
        kv_account = self.budget.open("KV cache")
        self.kv_arena = PagedArena(pages, kv_account, layout.num_parts)
        memory = KVPages((self.kv_arena, layout))
        self.cache = KVCache(memory.storage, memory)
        self.ranges: list[KVRange] = []
        self.arena = PagedArena(Counting(NUM_SLOTS * SLOT_BYTES, PAGE), self.account)
        self.ledger = SlotLedger(1, NUM_SLOTS, NUM_SLOTS)
        self.slots = PagedSlots(self.arena, SLOT_BYTES, self.ledger, 0)
        workspace = self.budget.open("workspace")
        self.room_arena = PagedArena(Counting(WORKSPACE_BYTES, PAGE), workspace)
        self.room = PagedRoom(self.room_arena, lambda: True)
        self.room.gives_way()

    def run_pass(self, range_bytes: int, library_bytes: int) -> None:
        """Writes to all that it has asked for."""
        placement = ArenaPlaces({}, range_bytes)
        self.room.hold(PassPlan(Counts(1, 1, 1), {}, placement, library_bytes, ""))
        self.room.bytes[:range_bytes].fill_(7)

    def give_way(self, num_bytes: int) -> None:
        left_bytes = max(0, self.slots.num_bytes(self.slots.num_live) - num_bytes)
        num_live = self.slots.num_within(left_bytes)
        for expert in np.flatnonzero(self.ledger.is_resident(0)).tolist()[num_live:]:
            self.ledger.evict(0, expert)
        self.slots.shrink(num_live)

    def fill(self) -> None:
        """Slots for all that is free, and an expert in each."""
        held_bytes = self.slots.num_bytes(self.slots.num_live)
        num_live = self.slots.num_within(held_bytes + self.budget.num_free_bytes)
        self.slots.grow(max(num_live, self.slots.num_live))
        absent = np.flatnonzero(~self.ledger.is_resident(0)).tolist()
        for expert in absent[: self.ledger.num_free]:
            slot = self.ledger.take()
            self.image(slot).fill_(1 + expert)
            self.ledger.bind(0, expert, slot)

    def image(self, slot: int) -> torch.Tensor:
        return self.arena.bytes[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]

    def check(self) -> None:
        self.ledger.check_integrity()
        for expert in np.flatnonzero(self.ledger.is_resident(0)).tolist():
            assert bool((self.image(self.ledger.slot_of(0, expert)) == 1 + expert).all())
        shares = self.budget.shares()
        assert shares["KV cache"] == physical_bytes(self.kv_arena)
        assert shares["expert slots"] == physical_bytes(self.arena)
        library_bytes = shares["workspace"] - physical_bytes(self.room_arena)
        assert library_bytes >= 0
        assert self.held_bytes + library_bytes == sum(shares.values()) <= self.budget.num_bytes


actions = st.lists(
    st.tuples(
        st.sampled_from(["join", "grow", "leave", "fill", "pass", "trim"]), st.integers(1, 60)
    ),
    max_size=25,
)


@examples(60)
@given(st.integers(0, 60), actions)
def test_memory_moves_and_is_never_more_than_the_budget(
    num_pages: int, steps: list[tuple[str, int]]
) -> None:
    machine = Machine(num_pages * PAGE)
    cache, ranges = machine.cache, machine.ranges
    for action, number in steps:
        kv = ranges[number % len(ranges)] if ranges else None
        if action == "fill":
            machine.fill()
        elif action == "join" and cache.can_allocate(number):
            try:
                ranges.append(cache.allocate(number))
            except PageError:  # what has to move finds no memory
                pass
        elif action == "pass":
            try:
                machine.run_pass(number * PAGE // 3, number * 100)
            except PageError:  # nobody but sequences has anything
                assert machine.slots.num_live == 0
        elif action == "trim":
            machine.room.trim()
        elif action == "leave" and kv is not None:
            ranges.remove(kv)
            cache.free(kv)
        elif action == "grow" and kv is not None:
            usable, wanted = kv.num_usable, min(number, kv.capacity)
            try:
                cache.prepare(kv, wanted)
                assert kv.num_usable >= wanted
            except PageError:
                assert kv.num_usable == usable and machine.slots.num_live == 0
        machine.check()
    for kv in ranges:
        cache.free(kv)
    machine.room.shrink()
    machine.fill()
    machine.check()
    assert machine.slots.num_live == machine.slots.num_within(machine.budget.num_bytes)
