"""Memory that a KV cache and expert slots share: the host's, or that of an emulated device.

A plan has room for a whole context and for so many slots. As long as sequences are short, what the
KV cache does not use holds more experts; when a sequence grows or joins, the coldest of them give
way. So the plan's promise is the worst case, and every step has all of the budget.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from lowtide.core import BoolArray, MemoryPlan, MoEShape, align_up
from lowtide.engine.opening import OpenModel
from lowtide.errors import PageError
from lowtide.experts.elastic_slots import ElasticSlots, LentSlots
from lowtide.experts.runtime import ExpertRuntime
from lowtide.experts.slots import SlotLedger
from lowtide.hardware import available_memory_bytes
from lowtide.memory.arena import HUGE_PAGE_BYTES, ElasticArena
from lowtide.memory.host_pages import HostPages
from lowtide.memory.kv_cache import GRANULE_TOKENS, KVCache
from lowtide.memory.kv_pages import KVLayout, KVPages
from lowtide.memory.pages import PageBudget
from lowtide.policies.lending import Use, grown, shrunk, worth_lending

KV_GROUP_BYTES = 4096
"""A small page: 16 tokens of a head of 128 in bfloat16. A huge one would be 8,192 of them."""

_NEWEST = 1 / 8
"""Weight of the last step in what sequences are thought to take per step."""

_PATIENCE_STEPS = 64
"""Steps without asking again where the system has refused memory for slots."""


class Division(NamedTuple):
    """How far the budget of a tier may be divided between a KV cache and expert slots."""

    budget_bytes: int  # for both
    slot_group_bytes: int
    num_slots: int  # that there can be at most, while the cache is empty
    kv: KVLayout  # of all tokens that there can be, while slots are no more than they have to be

    @classmethod
    def of(cls, opened: OpenModel, plan: MemoryPlan) -> Division:
        """The planned cache and slots are within the budget, and so is every other division."""
        tier, planned = plan.fast_tier, KVLayout(opened.kv_shape, opened.dtype)
        group_bytes = _group_bytes(tier.num_slots * tier.slot_bytes)
        fixed_bytes = tier.dense_bytes + tier.workspace_bytes + tier.ring_bytes
        slots_bytes = align_up(tier.num_slots * tier.slot_bytes, group_bytes)
        kv_bytes = planned.address_bytes(KV_GROUP_BYTES)
        # Whole pages may be a little more than the plan has: its overhead names some.
        budget_bytes = max(tier.budget_bytes - fixed_bytes, kv_bytes + slots_bytes)
        num_slots = min(plan.num_experts, budget_bytes // tier.slot_bytes)
        least_bytes = align_up(plan.num_staging * tier.slot_bytes, group_bytes)
        kv = planned
        if not opened.config.is_bidirectional:  # whose passes are as long as the cache
            kv = planned.longest(budget_bytes - least_bytes, KV_GROUP_BYTES, GRANULE_TOKENS)
        return cls(budget_bytes, group_bytes, num_slots, kv)


def elastic_tokens(opened: OpenModel, plan: MemoryPlan) -> int:
    """`MemoryPlan.elastic_tokens`; 0 where nothing is shared: `elastic` is not asked for, or all
    experts have slots for good."""
    if not opened.options.elastic or plan.fast_tier.num_slots == plan.num_experts:
        return 0
    return Division.of(opened, plan).kv.shape[3]


class SharedMemory:
    """Addresses for a KV cache and for expert slots, which draw on one budget."""

    def __init__(self, opened: OpenModel, plan: MemoryPlan) -> None:
        """Raises PlanError where there are not as many addresses."""
        division = Division.of(opened, plan)
        layout = division.kv
        self.tier = plan.fast_tier
        self.num_slots = division.num_slots
        self.max_range_tokens = opened.max_sequence_tokens
        self.budget = PageBudget(division.budget_bytes)
        self.kv_account = self.budget.open("KV cache")
        self.slots_account = self.budget.open("expert slots")
        pages = HostPages(layout.address_bytes(KV_GROUP_BYTES), KV_GROUP_BYTES)
        arena = ElasticArena(pages, self.kv_account, layout.num_parts, available_memory_bytes)
        self.kv = KVPages(arena, layout)
        self.arena = ElasticArena(
            HostPages(self.num_slots * self.tier.slot_bytes, division.slot_group_bytes),
            self.slots_account,
            free_bytes=available_memory_bytes,
        )

    def make_cache(self) -> KVCache:
        return KVCache(self.kv.storage, self.kv, self.max_range_tokens)

    def close(self) -> None:
        """Gives all memory back; nobody uses any of it any more."""
        self.slots_account.give_way = None
        self.kv.close()
        self.arena.close()

    def open_slots(self, shape: MoEShape) -> LentSlots:
        """As many as there can ever be, with memory behind the planned ones."""
        ledger = SlotLedger(shape.num_layers, shape.num_experts, self.num_slots)
        self.slots = ElasticSlots(self.arena, self.tier.slot_bytes, ledger, self.tier.num_slots)
        return LentSlots(ledger, self.arena)


class Tier(Protocol):
    """Whose slots come and go: the host's, or those of an emulated device."""

    ledger: SlotLedger

    def pause(self) -> None:
        """Between passes: ends what uses or fills a slot."""
        ...

    def evict(self, layer: int, expert: int) -> None: ...


class ElasticMemory:
    """Decides when memory moves between the KV cache and the expert slots, and has it moved.

    On the engine's thread, between passes or at the beginning of one.
    """

    def __init__(self, shared: SharedMemory, experts: ExpertRuntime, plan: MemoryPlan) -> None:
        """experts: whose fast tier has the slots of `shared`."""
        self._shared = shared
        self._slots = shared.slots
        self._experts = experts
        self._tier: Tier = experts.host if experts.device is None else experts.device
        ledger = self._tier.ledger
        experts.use = self._use = Use(ledger.num_layers, ledger.num_experts)
        self._num_staging = plan.num_staging
        self._growth_bytes = 0.0  # that sequences take per step
        self._kv_bytes = 0
        self._num_patient = 0
        self.num_given = self.num_moved = self.num_lent = 0
        shared.slots_account.give_way = self.give_way

    def close(self) -> None:
        """Gives all memory back, at once and whoever still holds tensors over it."""
        self._shared.close()

    def as_dict(self) -> dict[str, float]:
        """What it did since it was made, and the slots that there are now."""
        return {
            "num_slots": self._slots.num_live,
            "num_slots_lent": self.num_lent,
            "num_slots_given": self.num_given,
            "num_residents_moved": self.num_moved,
        }

    def give_way(self, num_bytes: int) -> None:
        """Takes memory from the slots of the coldest experts, but not the last that every step
        needs."""
        slots = self._slots
        left_bytes = max(0, slots.num_bytes(slots.num_live) - num_bytes)
        num_live = max(self._num_staging, slots.num_within(left_bytes))
        count = slots.num_live - num_live
        if count <= 0:
            return
        self._tier.pause()
        self._make_room(num_live)
        self.num_moved += slots.shrink(num_live)
        self.num_given += count

    def settle(self) -> None:
        """After a pass: lends to the slots what sequences will not want soon."""
        kv_bytes = self._shared.kv_account.num_bytes
        growth_bytes, self._kv_bytes = max(0, kv_bytes - self._kv_bytes), kv_bytes
        self._growth_bytes += _NEWEST * (growth_bytes - self._growth_bytes)
        self._num_patient = max(0, self._num_patient - 1)
        num_live = self._num_worth_having()
        if num_live > self._slots.num_live and not self._num_patient:
            self._lend(num_live)
        self._fill()

    def restore(self) -> None:
        """Brings the planned slots back, for a policy that begins anew with as many.

        Raises PageError where the system has less than the budget.
        """
        if self._slots.num_live < self._shared.tier.num_slots:
            self._slots.grow(self._shared.tier.num_slots)

    def _lend(self, num_live: int) -> None:
        count = num_live - self._slots.num_live
        try:
            self._slots.grow(num_live)
        except PageError:  # the system has less than the budget: what there is has to do
            self._num_patient = _PATIENCE_STEPS
        else:
            self.num_lent += count

    def _fill(self) -> None:
        """Lets residents have what slots there are beside those that experts pass through."""
        room = self._experts.room
        num_residents = int(room.capacity.sum())
        count = min(self._slots.num_live - self._num_staging, self._use.mean.size) - num_residents
        if count > 0:
            room.change(grown(room.capacity, self._residents(), self._use.mean, count))

    def _num_worth_having(self) -> int:
        """Live slots that would pay now."""
        slots, free_bytes = self._slots, self._shared.budget.num_free_bytes
        num_new = free_bytes // self._shared.tier.slot_bytes
        if not num_new or slots.num_live == self._shared.num_slots:
            return slots.num_live
        absent = self._use.mean[~self._residents()]
        num_cold = max(0, len(absent) - num_new)
        hottest = np.partition(absent, num_cold)[num_cold:] if num_cold else absent
        lent_bytes = worth_lending(free_bytes, self._growth_bytes, float(hottest.mean()))
        return slots.num_within(slots.num_bytes(slots.num_live) + lent_bytes)

    def _make_room(self, num_live: int) -> None:
        """Leaves no more residents than so many slots have room for."""
        room = self._experts.room
        count = int(room.capacity.sum()) - (num_live - self._num_staging)
        if count > 0:
            capacity, evict = shrunk(room.capacity, self._residents(), self._use.mean, count)
            for layer, expert in evict:
                self._tier.evict(layer, expert)
            room.change(capacity)

    def _residents(self) -> BoolArray:
        """[layers, experts]"""
        ledger = self._tier.ledger
        return np.stack([ledger.is_resident(layer) for layer in range(ledger.num_layers)])


def _group_bytes(num_bytes: int) -> int:
    """Huge pages, but where slots are too small for one more to be nothing."""
    return HUGE_PAGE_BYTES if num_bytes >= 32 * HUGE_PAGE_BYTES else KV_GROUP_BYTES
