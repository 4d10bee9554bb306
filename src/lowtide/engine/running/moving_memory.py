"""Memory shared by KV cache, workspace and expert slots, on the host or an emulated device.

A plan has room for a whole context and a number of slots. While sequences are short, memory not
used by the KV cache and by bidirectional passes holds more experts. When a sequence grows or joins,
the coldest experts are evicted. So the plan is the worst case, and every step uses the whole
budget.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lowtide.core import MoEShape
from lowtide.engine.opening.facts import ContextFacts
from lowtide.engine.planning.budget_division import SMALL_GROUP_BYTES, Division, group_bytes
from lowtide.engine.running.kept_room import KeptRoom
from lowtide.engine.running.moving_slots import FreeMemory, MovingSlots
from lowtide.engine.running.pass_room import paged_room
from lowtide.errors import InternalError, PageError
from lowtide.experts.paged_slots import PagedSlots
from lowtide.experts.runtime import ExpertRuntime
from lowtide.experts.slots import SlotLedger
from lowtide.hardware.memory import available_memory_bytes
from lowtide.memory.arena import PagedArena
from lowtide.memory.host_pages import HostPages
from lowtide.memory.kv_cache import KVCache, cache_over
from lowtide.memory.kv_pages import KVLayout, KVPages, KVShape
from lowtide.memory.pages import PageBudget
from lowtide.memory.pass_plans import PagedRoom
from lowtide.memory.states import StateLayout, StateStore
from lowtide.plan import MemoryPlan, TierPlan
from lowtide.policies.slot_lending import worth_lending

_NEWEST = 1 / 8
"""Weight of the newest step in the mean growth of sequences."""

_PATIENCE_STEPS = 64
"""Steps to wait after the system has refused memory for slots."""

_LOOK_PASSES = 16
"""Passes between weighing the oldest kept keys against slots, about as many as the use of experts
is averaged over."""


class SharedMemory:
    """Address ranges of a KV cache, a workspace and expert slots under one budget.

    `kv`, `kept` and `room` are None if absent, or if their memory does not move.
    """

    def __init__(
        self, division: Division, tier: TierPlan, context: ContextFacts, dtype: torch.dtype
    ) -> None:
        """Raises PlanError if the address space is too small."""
        self.tier = tier
        self.num_slots = division.num_slots
        self.max_range_tokens = context.max_sequence_tokens
        self.budget = PageBudget(division.budget_bytes)
        self.kv: KVPages | None = None
        self.kept: KeptRoom | None = None
        self._kv_shape, self._dtype = division.kv, dtype
        if division.kv is not None:
            self.kv = kv_pages_of(self.budget, division.kv, dtype, division.states)
            whole = [KVLayout(each, dtype).token_bytes for each in division.kv.groups]
            capped = [KVLayout(each.storage, dtype).token_bytes for each in division.kv.windows]
            planned_bytes = context.kv_shape.num_elements * dtype.itemsize + tier.state_bytes
            self.kept = KeptRoom(
                planned_bytes // (sum(whole) or sum(capped)),
                sum(whole),
                self.tier.slot_bytes,
                0 if division.states is None else division.states.slot_bytes,
                capped,
            )
        self._state_layout = division.states
        self.room: PagedRoom | None = None
        if division.workspace_bytes:
            self.room = paged_room(
                division.workspace_bytes, self.budget, lambda: self.slots.num_live < self.num_slots
            )
            self.room.gives_way()
        self.cache: KVCache  # from `make_cache` on
        self.slots: PagedSlots  # from `open_slots` on
        self.slots_account = self.budget.open("expert slots")
        self.arena = PagedArena(
            HostPages(self.num_slots * self.tier.slot_bytes, division.slot_group_bytes),
            self.slots_account,
            free_bytes=available_memory_bytes,
        )

    @property
    def others_bytes(self) -> int:
        """Bytes in use by everything but the slots."""
        return self.budget.num_bytes - self.budget.num_free_bytes - self.slots_account.num_bytes

    def make_cache(self, kv: KVPages) -> KVCache:
        """Make the KV cache.

        Its kept ranges are dropped by the rule `kept`, and whenever the budget is used up.
        """
        if self._kv_shape is None:
            raise InternalError("A KV cache without a shape was asked for.")
        states = paged_states(kv, self._state_layout)
        self.cache = cache_over(
            self._kv_shape, kv.all_storage, kv, self.max_range_tokens, self.kept, states
        )
        kv.account.give_way = self.cache.give_way
        return self.cache

    def close(self) -> None:
        """Free all memory, which must no longer be in use."""
        self.slots_account.give_way = None
        if self.kv is not None:
            self.kv.close()
        if self.room is not None:
            self.room.close()
        self.arena.close()

    def open_slots(self, shape: MoEShape) -> PagedSlots:
        """Make the most slots that there can be, with memory for the planned ones."""
        ledger = SlotLedger(shape.num_layers, shape.num_experts, self.num_slots)
        self.slots = PagedSlots(self.arena, self.tier.slot_bytes, ledger, self.tier.num_slots)
        return self.slots


class MovingMemory:
    """Moves memory between sequences, their passes, and the expert slots.

    Used on the engine's thread, between passes or at the beginning of one.
    """

    def __init__(self, shared: SharedMemory, experts: ExpertRuntime, plan: MemoryPlan) -> None:
        """experts: their fast tier uses the slots of `shared`."""
        self.shared = shared
        self._slots = shared.slots
        self._experts = experts
        tier = experts.device or experts.host
        self._moving = MovingSlots(
            shared.slots, tier, plan.num_staging, lambda: experts.capacity, tier.at_rest
        )
        experts.use = self._moving.use
        self._growth_bytes = 0.0  # that sequences and their passes take per step
        self._others_bytes = 0
        self._patient_steps_left = 0
        num_lendable = max(0, shared.tier.num_slots - plan.num_staging)
        least_bytes = shared.budget.num_bytes - num_lendable * shared.tier.slot_bytes
        self._free = FreeMemory(shared.budget, least_bytes)
        if shared.kept is not None and experts.device is None:
            shared.kept.slot_use = self._slot_use
        shared.slots_account.give_way = self._moving.give_way

    def close(self) -> None:
        """Free all memory at once, even if tensors over it remain."""
        self.shared.close()

    def as_dict(self) -> dict[str, float]:
        """Return counters since loading, and the present number of slots."""
        kept = {} if self.shared.kept is None else self.shared.kept.as_dict()
        return {
            **kept,
            "num_slots": self._slots.num_live,
            "num_slots_lent": self._moving.num_taken,
            "num_slots_given": self._moving.num_given,
            "num_residents_moved": self._moving.num_moved,
        }

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes that each part holds at this moment, by its name in a `TierPlan`.

        May be called on any thread.
        """
        names = {"KV cache": "kv_cache", "expert slots": "slots"}
        shares = self.shared.budget.shares()
        return {names.get(owner, owner): num_bytes for owner, num_bytes in shares.items()}

    def note_pass(self, num_prompt_rows: int, prompt_s: float) -> None:
        """Record rows and seconds of a pass with only prompts; call before `settle`.

        They are the price of computing dropped keys again, weighed against slots.
        """
        if (kept := self.shared.kept) is None:
            return
        experts = self._experts
        kept.note_pass(
            num_prompt_rows, prompt_s, experts.stats.num_misses, experts.host.stats.wait_s
        )
        if kept.num_passes % _LOOK_PASSES == 0:
            self.shared.cache.apply_rule()

    def settle(self) -> None:
        """Adjust after a pass: lend memory to slots that sequences will not need soon."""
        self.follow_free_memory()
        if self.shared.room is not None:
            self.shared.room.trim()
        others_bytes = self.shared.others_bytes
        growth_bytes = max(0, others_bytes - self._others_bytes)
        self._others_bytes = others_bytes
        self._growth_bytes += _NEWEST * (growth_bytes - self._growth_bytes)
        self._patient_steps_left = max(0, self._patient_steps_left - 1)
        if not self._patient_steps_left and not self._free.is_short:
            try:
                self._moving.grow(self._num_worth_having())
            except PageError:  # the system has less than the budget: what there is has to do
                self._patient_steps_left = _PATIENCE_STEPS
        self._moving.fill()

    def follow_free_memory(self) -> None:
        """Return memory if the system runs short of it, and take it again later.

        Runs between passes and while a server is idle. Kept keys are dropped first, then the
        coldest experts.
        """
        self._free.follow()

    def restore(self) -> None:
        """Restore the planned slots, for a policy that starts afresh.

        Raises PageError if the system has less memory than the budget.
        """
        self._moving.grow(self.shared.tier.num_slots)

    def _num_worth_having(self) -> int:
        """Return the number of slots that would pay now."""
        slots, free_bytes = self._slots, self.shared.budget.num_free_bytes
        num_new = free_bytes // self.shared.tier.slot_bytes
        if not num_new or slots.num_live == self.shared.num_slots:
            return slots.num_live
        lent_bytes = worth_lending(free_bytes, self._growth_bytes, self._absent_use(num_new))
        return slots.num_within(slots.num_bytes(slots.num_live) + lent_bytes)

    def _slot_use(self, num_bytes: int) -> float:
        shared, slot_bytes = self.shared, self.shared.tier.slot_bytes
        if self._free.is_short or self._patient_steps_left:  # no slot can be made now
            return 0.0
        if self._slots.num_live == shared.num_slots or shared.budget.num_free_bytes >= slot_bytes:
            return 0.0
        return self._absent_use(max(1, num_bytes // slot_bytes))

    def _absent_use(self, num_new: int) -> float:
        """Return the share of passes in which each of `num_new` residents would save a read."""
        absent = self._moving.use.mean[~self._slots.ledger.residents]
        num_cold = max(0, len(absent) - num_new)
        hottest = np.partition(absent, num_cold)[num_cold:] if num_cold else absent
        return float(hottest.mean())


def kv_pages(
    budget: PageBudget,
    layouts: Sequence[KVLayout],
    states: StateLayout | None = None,
    windows: Sequence[KVLayout] = (),
) -> KVPages:
    """Reserve addresses of a KV cache, of windows and states, with memory from the budget."""
    account = budget.open("KV cache")

    def arena(layout: KVLayout) -> PagedArena:
        pages = HostPages(layout.address_bytes(SMALL_GROUP_BYTES), SMALL_GROUP_BYTES)
        return PagedArena(pages, account, layout.num_parts, available_memory_bytes)

    of_states = None
    if states is not None:
        pages = HostPages(states.num_bytes, group_bytes(states.num_bytes))
        of_states = PagedArena(pages, account, 1, available_memory_bytes)
    of_windows = [KVPages((arena(layout), layout)) for layout in windows]
    groups = ((arena(layout), layout) for layout in layouts)
    return KVPages(*groups, states=of_states, windows=of_windows)


def kv_pages_of(
    budget: PageBudget, shape: KVShape, dtype: torch.dtype, states: StateLayout | None
) -> KVPages:
    """Reserve the addresses of a cache of this shape; see `kv_pages`."""
    whole = [KVLayout(each, dtype) for each in shape.groups]
    capped = [KVLayout(each.storage, dtype) for each in shape.windows]
    return kv_pages(budget, whole, states, capped)


def paged_states(pages: KVPages, layout: StateLayout | None) -> StateStore | None:
    """Make the store of states over the memory of `pages`."""
    if layout is None or pages.states is None:
        return None
    return StateStore(layout, pages.states.bytes, pages.states)
