"""The slot ledger under any sequence of events, and the layout of slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from examples import scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lowtide.core import ALIGNMENT, MoEShape
from lowtide.errors import InternalError
from lowtide.experts.layout import SlotLayout
from lowtide.experts.slots import ExpertSlots, SlotLedger
from lowtide.memory.arena import Arena

indices = st.integers(0, 10**6)


class LedgerMachine(RuleBasedStateMachine):
    """The ledger against plain sets and dictionaries; wrong requests must change nothing."""

    @initialize(
        num_layers=st.integers(1, 3),
        num_experts=st.integers(1, 5),
        num_slots=st.integers(0, 8),
    )
    def make(self, num_layers: int, num_experts: int, num_slots: int) -> None:
        self.ledger = SlotLedger(num_layers, num_experts, num_slots)
        self.experts = [(layer, e) for layer in range(num_layers) for e in range(num_experts)]
        self.num_layers = num_layers
        self.num_slots = num_slots
        self.taken: set[int] = set()
        self.bound: dict[tuple[int, int], int] = {}
        self.leases: dict[int, int] = {}
        self.retired: set[int] = set()

    @property
    def free(self) -> set[int]:
        used = self.taken | self.retired | set(self.bound.values())
        return set(range(self.num_slots)) - used

    @rule()
    def take(self) -> None:
        if self.free:
            slot = self.ledger.take()
            assert slot in self.free
            self.taken.add(slot)
        else:
            num_live = self.num_slots - len(self.retired)
            with pytest.raises(InternalError, match=f"All {num_live} "):
                self.ledger.take()

    @precondition(lambda self: self.num_slots)
    @rule(which=indices)
    def retire(self, which: int) -> None:
        slot = which % self.num_slots
        if slot in self.free:
            self.ledger.retire(slot)
            self.retired.add(slot)
        else:
            with pytest.raises(InternalError, match="not free"):
                self.ledger.retire(slot)

    @precondition(lambda self: self.num_slots)
    @rule(which=indices)
    def restore(self, which: int) -> None:
        slot = which % self.num_slots
        if slot in self.retired:
            self.ledger.restore(slot)
            self.retired.remove(slot)
        else:
            with pytest.raises(InternalError, match="not retired"):
                self.ledger.restore(slot)

    @precondition(lambda self: self.num_slots)
    @rule(which=indices, where=indices)
    def move(self, which: int, where: int) -> None:
        slot, target = which % self.num_slots, where % self.num_slots
        owners = {slot: place for place, slot in self.bound.items()}
        if slot not in owners:
            with pytest.raises(InternalError, match="no expert to move"):
                self.ledger.move(slot, target)
        elif target not in self.taken:
            with pytest.raises(InternalError, match="not taken"):
                self.ledger.move(slot, target)
        elif self.leases.get(slot):
            with pytest.raises(InternalError, match="in use"):
                self.ledger.move(slot, target)
        else:
            self.ledger.move(slot, target)
            self.taken.remove(target)
            self.bound[owners[slot]] = target

    @precondition(lambda self: not any(self.leases.values()))
    @rule()
    def reclaim(self) -> None:
        self.ledger.reclaim()
        self.taken.clear()

    @precondition(lambda self: self.taken)
    @rule(which=indices, expert=indices)
    def bind(self, which: int, expert: int) -> None:
        slot = sorted(self.taken)[which % len(self.taken)]
        place = self.experts[expert % len(self.experts)]
        if place in self.bound:
            with pytest.raises(InternalError, match="already"):
                self.ledger.bind(*place, slot)
        else:
            self.ledger.bind(*place, slot)
            self.taken.remove(slot)
            self.bound[place] = slot

    @precondition(lambda self: self.taken)
    @rule(which=indices)
    def drop(self, which: int) -> None:
        slot = sorted(self.taken)[which % len(self.taken)]
        self.ledger.drop(slot)
        self.taken.remove(slot)

    @precondition(lambda self: self.taken != set(range(self.num_slots)))
    @rule(which=indices, expert=indices)
    def use_a_slot_that_is_not_taken(self, which: int, expert: int) -> None:
        others = sorted(set(range(self.num_slots)) - self.taken)
        slot = others[which % len(others)]
        with pytest.raises(InternalError, match="not taken"):
            self.ledger.drop(slot)
        with pytest.raises(InternalError, match="not taken"):
            self.ledger.bind(*self.experts[expert % len(self.experts)], slot)

    @precondition(lambda self: self.bound)
    @rule(which=indices)
    def lease(self, which: int) -> None:
        place = sorted(self.bound)[which % len(self.bound)]
        slot = self.ledger.slot_of(*place)
        self.ledger.lease(slot)
        self.leases[slot] = self.leases.get(slot, 0) + 1

    @precondition(lambda self: self.num_slots)
    @rule(which=indices)
    def lease_only_what_is_bound(self, which: int) -> None:
        slot = which % self.num_slots
        if slot not in self.bound.values():
            with pytest.raises(InternalError, match="no expert"):
                self.ledger.lease(slot)

    @precondition(lambda self: self.num_slots)
    @rule(which=indices)
    def release(self, which: int) -> None:
        slot = which % self.num_slots
        if self.leases.get(slot):
            self.ledger.release(slot)
            self.leases[slot] -= 1
        else:
            with pytest.raises(InternalError, match="without a lease"):
                self.ledger.release(slot)

    @rule(which=indices)
    def evict(self, which: int) -> None:
        place = self.experts[which % len(self.experts)]
        slot = self.bound.get(place)
        if slot is None:
            with pytest.raises(InternalError, match="in no slot"):
                self.ledger.evict(*place)
        elif self.leases.get(slot):
            with pytest.raises(InternalError, match="in use"):
                self.ledger.evict(*place)
        else:
            self.ledger.evict(*place)
            del self.bound[place]

    @invariant()
    def agrees(self) -> None:
        assert self.ledger.num_free == len(self.free)
        for slot in range(self.num_slots):
            assert self.ledger.is_free(slot) == (slot in self.free)
        assert self.ledger.num_resident == len(self.bound)
        for layer in range(self.num_layers):
            residents = np.flatnonzero(self.ledger.is_resident(layer)).tolist()
            assert residents == sorted(e for other, e in self.bound if other == layer)
        for place, slot in self.bound.items():
            assert self.ledger.slot_of(*place) == slot

    @invariant()
    def is_whole(self) -> None:
        if any(self.leases.values()):
            with pytest.raises(InternalError, match=f"{sum(self.leases.values())} leases"):
                self.ledger.check_integrity()
        else:
            self.ledger.check_integrity()


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=scaled(40), stateful_step_count=30)


def test_integrity_is_really_checked() -> None:
    ledger = SlotLedger(1, 4, 3)
    ledger.bind(0, 2, ledger.take())
    ledger.free.add(0)  # slot 0 is now bound and free
    with pytest.raises(InternalError, match="do not make 3"):
        ledger.check_integrity()
    ledger.free.state[1] -= 1
    ledger.table[0, 3] = 0
    with pytest.raises(InternalError, match="2 residents for 1 bound"):
        ledger.check_integrity()
    ledger.table[0] = [-1, -1, 1, -1]
    with pytest.raises(InternalError, match="disagree"):
        ledger.check_integrity()


@pytest.mark.parametrize("num_leases", [1, 2])
def test_an_expert_in_use_stays_until_its_last_lease_is_released(num_leases: int) -> None:
    ledger = SlotLedger(1, 4, 3)
    slot = ledger.take()
    ledger.bind(0, 2, slot)
    for _ in range(num_leases):
        ledger.lease(slot)
    for _ in range(num_leases):
        with pytest.raises(InternalError, match="expert 2, which is in use"):
            ledger.evict(0, 2)
        assert ledger.slot_of(0, 2) == slot and ledger.num_free == 2
        ledger.release(slot)
    ledger.evict(0, 2)
    assert ledger.num_free == 3
    ledger.check_integrity()


def test_several_slots_change_owners_together_or_none_does() -> None:
    ledger = SlotLedger(1, 6, 4)
    assert ledger.take_several(3) == [0, 1, 2]
    with pytest.raises(InternalError, match="All 4 expert slots are in use"):
        ledger.take_several(2)
    for expert, slot in enumerate([2, 0, 1]):
        ledger.bind(0, expert, slot)
    ledger.lease(1)
    with pytest.raises(InternalError, match="expert 2, which is in use"):
        ledger.evict(0, 0, 2)
    with pytest.raises(InternalError, match="Expert 5 of MoE layer 0 is in no slot"):
        ledger.evict(0, 0, 5)
    assert ledger.num_resident == 3
    ledger.release(1)
    ledger.evict(0, 1, 0)
    ledger.evict(0)
    ledger.check_integrity()
    assert ledger.take_several(3) == [3, 0, 2]  # first freed, first taken


def test_asking_what_is_resident_gives_a_copy() -> None:
    ledger = SlotLedger(1, 4, 3)
    before = ledger.is_resident(0)
    ledger.bind(0, 2, ledger.take())
    assert not before.any()
    assert ledger.is_resident(0).tolist() == [False, False, True, False]


@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.integers(1, 5),
)
def test_parts_are_aligned_disjoint_and_the_same_in_every_slot(
    hidden: int, width: int, dtype: torch.dtype, num_slots: int
) -> None:
    layout = SlotLayout.of(MoEShape(1, 1, 1, hidden, width), dtype)
    assert layout.num_bytes % ALIGNMENT == 0
    arena = Arena(num_slots * layout.num_bytes)
    slots = ExpertSlots(arena, layout)
    shapes = [(width, hidden), (width, hidden), (hidden, width)]
    for slot in range(num_slots):
        base = arena.bytes.data_ptr() + slot * layout.num_bytes
        for part, (weight, shape) in enumerate(zip(slots.weights(0, slot), shapes, strict=True)):
            assert tuple(weight.shape) == shape
            assert weight.dtype == dtype
            assert weight.data_ptr() == base + layout.largest.parts[part].offsets[0]
            assert weight.data_ptr() % ALIGNMENT == 0
            assert len(slots.part(0, slot, part)) == weight.numel() * dtype.itemsize
            slots.part(0, slot, part)[:] = 1 + (3 * slot + part) % 100
    for slot in range(num_slots):  # nothing overlapped
        for part, weight in enumerate(slots.weights(0, slot)):
            assert bool((weight.view(torch.uint8) == 1 + (3 * slot + part) % 100).all())


def test_reclaiming_ends_all_use_and_undoes_what_was_half_made() -> None:
    ledger = SlotLedger(num_layers=1, num_experts=4, num_slots=4)
    for expert in (0, 1):
        ledger.bind(0, expert, ledger.take())
    ledger.lease(ledger.slot_of(0, 0))
    ledger.take()
    ledger.table[0, 1] = -1  # an eviction that Ctrl-C stopped after its first half
    ledger.reclaim()
    ledger.check_integrity()
    assert (ledger.num_free, ledger.num_resident) == (3, 1)
    ledger.evict(0, 0)
    assert sorted(ledger.take() for _ in range(4)) == [0, 1, 2, 3]
