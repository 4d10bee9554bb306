"""Slots that come and go while experts stay where they are found."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from test_paged_arena import physical_bytes

from lowtide.core import align_up
from lowtide.errors import InternalError, PageError
from lowtide.experts.paged_slots import PagedSlots
from lowtide.experts.slots import SlotLedger
from lowtide.memory.arena import HUGE_PAGE_BYTES, PagedArena
from lowtide.memory.host_pages import HostPages
from lowtide.memory.pages import PageBudget

NUM_LAYERS, NUM_EXPERTS = 2, 8
PAGE = 4096


class Tier:
    """Slots of 64 to some thousand bytes on small pages, each expert's bytes its own number."""

    def __init__(self, slot_bytes: int, num_slots: int, num_live: int, budget_bytes: int) -> None:
        self.budget = PageBudget(budget_bytes)
        pages = HostPages(num_slots * slot_bytes, PAGE)
        self.arena = PagedArena(pages, self.budget.open("expert slots"))
        self.ledger = SlotLedger(NUM_LAYERS, NUM_EXPERTS, num_slots)
        self.paged = PagedSlots(self.arena, slot_bytes, self.ledger, num_live)
        self.slot_bytes = slot_bytes

    def image(self, slot: int) -> torch.Tensor:
        return self.arena.bytes[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def bring(self, layer: int, expert: int) -> None:
        slot = self.ledger.take()
        self.image(slot).fill_(1 + layer * NUM_EXPERTS + expert)
        self.ledger.bind(layer, expert, slot)

    def residents(self) -> list[tuple[int, int]]:
        return [
            (layer, int(expert))
            for layer in range(NUM_LAYERS)
            for expert in np.flatnonzero(self.ledger.is_resident(layer))
        ]

    def check(self) -> None:
        self.ledger.check_integrity()
        for layer, expert in self.residents():
            slot = self.ledger.slot_of(layer, expert)
            assert slot < self.paged.num_live
            assert bool((self.image(slot) == 1 + layer * NUM_EXPERTS + expert).all())
        held_bytes = align_up(self.paged.num_live * self.slot_bytes, PAGE)
        assert self.paged.num_bytes(self.paged.num_live) == held_bytes
        assert self.arena.committed_bytes == physical_bytes(self.arena) == held_bytes
        assert self.budget.shares() == {"expert slots": held_bytes}


@examples(40)
@given(
    slot_bytes=st.integers(1, 200).map(lambda n: 64 * n),
    num_slots=st.integers(1, 14),
    seed=st.integers(0, 10**6),
)
def test_experts_stay_resident_while_slots_go_and_come(
    slot_bytes: int, num_slots: int, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    budget_bytes = align_up(int(draw.integers(1, num_slots + 1)) * slot_bytes, PAGE)
    tier = Tier(slot_bytes, num_slots, 0, budget_bytes)
    most = tier.paged.num_within(budget_bytes)
    assert tier.paged.num_bytes(most) <= budget_bytes
    assert most == num_slots or tier.paged.num_bytes(most + 1) > budget_bytes
    everyone = [(layer, e) for layer in range(NUM_LAYERS) for e in range(NUM_EXPERTS)]
    for _ in range(12):
        wanted = int(draw.integers(0, num_slots + 1))
        residents = tier.residents()
        if wanted > most and wanted > tier.paged.num_live:
            with pytest.raises(PageError, match="expert slots wants"):
                tier.paged.grow(wanted)
        elif wanted >= tier.paged.num_live:
            tier.paged.grow(wanted)
        else:
            draw.shuffle(residents)
            for place in residents[wanted:]:
                tier.ledger.evict(*place)
            num_beyond = sum(tier.ledger.slot_of(*place) >= wanted for place in residents[:wanted])
            assert tier.paged.shrink(wanted) == num_beyond
            assert sorted(residents[:wanted]) == tier.residents()
        tier.check()
        absent = [place for place in everyone if place not in tier.residents()]
        draw.shuffle(absent)
        for place in absent[: int(draw.integers(0, tier.ledger.num_free + 1))]:
            tier.bring(*place)
        tier.check()


def test_no_slot_in_use_is_lost() -> None:
    tier = Tier(PAGE, 4, 4, 4 * PAGE)
    for expert in range(3):
        tier.bring(0, expert)
    taken = tier.ledger.take()
    assert taken == 3
    with pytest.raises(InternalError, match="Slots 3 to 4 .*but 1 are taken and 0 leased"):
        tier.paged.shrink(3)
    tier.ledger.drop(taken)
    tier.ledger.lease(2)
    with pytest.raises(InternalError, match="Slots 2 to 4 .*but 0 are taken and 1 leased"):
        tier.paged.shrink(2)
    tier.ledger.release(2)
    with pytest.raises(InternalError, match="1 residents leave their slots for 0 free ones"):
        tier.paged.shrink(2)
    tier.check()
    assert tier.paged.num_live == 4
    tier.ledger.evict(0, 0)
    assert tier.paged.shrink(2) == 1
    tier.check()


def test_huge_slots_leave_less_than_one_group_unused() -> None:
    slot_bytes = 9 << 20  # Qwen3-30B's: four and a half groups
    budget = PageBudget(100 << 20)
    arena = PagedArena(HostPages(8 * slot_bytes), budget.open("expert slots"))
    slots = PagedSlots(arena, slot_bytes, SlotLedger(1, 8, 8), 5)
    assert arena.committed_bytes == 46 << 20 == slots.num_bytes(5)
    slots.shrink(4)
    assert arena.committed_bytes == 36 << 20 == physical_bytes(arena)
    assert slots.num_within((46 << 20) - 1) == 4
    assert slots.num_within((46 << 20) + HUGE_PAGE_BYTES) == 5
