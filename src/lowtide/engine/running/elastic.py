"""Memory that a KV cache, a workspace and expert slots share, on the host or an emulated device.

A plan has room for a whole context and for a number of slots. As long as sequences are short, the
memory that the KV cache and the workspace of bidirectional passes leave holds more experts; when a
sequence grows or joins, the coldest of them give way. So the plan's promise is the worst case, and
every step uses the whole budget.
"""

from __future__ import annotations

import time

import numpy as np

from lowtide.core import BoolArray, MoEShape
from lowtide.engine.opening.facts import ContextFacts
from lowtide.engine.planning.elastic_plan import SMALL_GROUP_BYTES, Division
from lowtide.engine.running.kept_room import KeptRoom
from lowtide.engine.running.pass_room import paged_room
from lowtide.errors import PageError
from lowtide.experts.device_tier import DeviceTier
from lowtide.experts.elastic_slots import ElasticSlots
from lowtide.experts.host_tier import HostTier
from lowtide.experts.runtime import ExpertRuntime
from lowtide.experts.slots import SlotLedger
from lowtide.hardware.memory import available_memory_bytes
from lowtide.memory.arena import ElasticArena
from lowtide.memory.host_pages import HostPages
from lowtide.memory.kv_cache import KVCache
from lowtide.memory.kv_pages import KVLayout, KVPages
from lowtide.memory.pages import PageBudget
from lowtide.memory.pass_plans import PagedRoom
from lowtide.plan import MemoryPlan, TierPlan
from lowtide.policies.lending import ExpertUse, grown, shrunk, worth_lending

_NEWEST = 1 / 8
"""Weight of the last step in what sequences are thought to take per step."""

_PATIENCE_STEPS = 64
"""Steps without asking again where the system has refused memory for slots."""


SYSTEM_BYTES = 256 << 20
"""Free memory that is left to other programs: below it some is given back to the system, and above
twice as much taken again."""

_LOOK_S = 1.0
"""How often that is looked at."""

_LOOK_PASSES = 16
"""How often the oldest kept keys are weighed against slots: the use of experts is known for about
sixteen passes."""


class SharedMemory:
    """Addresses for a KV cache, for a workspace and for expert slots, which draw on one budget.

    `kv`, `kept` and `room` are None where there is no such thing, or its memory does not move.
    """

    def __init__(self, division: Division, tier: TierPlan, context: ContextFacts) -> None:
        """Raises PlanError where there are not as many addresses."""
        self.tier = tier
        self.num_slots = division.num_slots
        self.max_range_tokens = context.max_sequence_tokens
        self.budget = PageBudget(division.budget_bytes)
        self.kv: KVPages | None = None
        self.kept: KeptRoom | None = None
        if division.kv is not None:
            token_bytes = division.kv.token_bytes
            self.kv = kv_pages(self.budget, division.kv)
            self.kept = KeptRoom(context.kv_shape.num_tokens, token_bytes, self.tier.slot_bytes)
        self.room: PagedRoom | None = None
        if division.workspace_bytes:
            self.room = paged_room(
                division.workspace_bytes, self.budget, lambda: self.slots.num_live < self.num_slots
            )
            self.room.gives_way()
        self.cache: KVCache  # from `make_cache` on
        self.slots: ElasticSlots  # from `open_slots` on
        self.slots_account = self.budget.open("expert slots")
        self.arena = ElasticArena(
            HostPages(self.num_slots * self.tier.slot_bytes, division.slot_group_bytes),
            self.slots_account,
            free_bytes=available_memory_bytes,
        )

    @property
    def others_bytes(self) -> int:
        """What all have together but the slots."""
        return self.budget.num_bytes - self.budget.num_free_bytes - self.slots_account.num_bytes

    def make_cache(self, kv: KVPages) -> KVCache:
        """Its kept ranges give way as `kept` says, and where the budget has no more."""
        self.cache = KVCache(kv.storage, kv, self.max_range_tokens, self.kept)
        kv.arena.account.give_way = self.cache.give_way
        return self.cache

    def close(self) -> None:
        """Gives all memory back; nothing uses any of it any more."""
        self.slots_account.give_way = None
        if self.kv is not None:
            self.kv.arena.close()
        if self.room is not None:
            self.room.close()
        self.arena.close()

    def open_slots(self, shape: MoEShape) -> ElasticSlots:
        """As many as there can ever be, with memory behind the planned ones."""
        ledger = SlotLedger(shape.num_layers, shape.num_experts, self.num_slots)
        self.slots = ElasticSlots(self.arena, self.tier.slot_bytes, ledger, self.tier.num_slots)
        return self.slots


class ElasticMemory:
    """Decides when memory moves to and from the expert slots, and has it moved.

    On the engine's thread, between passes or at the beginning of one.
    """

    def __init__(self, shared: SharedMemory, experts: ExpertRuntime, plan: MemoryPlan) -> None:
        """experts: whose fast tier has the slots of `shared`."""
        self._shared = shared
        self._slots = shared.slots
        self._experts = experts
        self._tier: HostTier | DeviceTier = experts.device or experts.host
        ledger = self._tier.ledger
        experts.use = self._use = ExpertUse(ledger.num_layers, ledger.num_experts)
        self._num_staging = plan.num_staging
        self._growth_bytes = 0.0  # that sequences and their passes take per step
        self._others_bytes = 0
        self._patient_steps_left = 0
        self._looked_s = 0.0
        self._is_short = False  # whether the system has had memory back and has none to spare yet
        self._most_bytes = shared.budget.num_bytes
        num_lendable = max(0, shared.tier.num_slots - plan.num_staging)
        self._least_bytes = self._most_bytes - num_lendable * shared.tier.slot_bytes
        self.num_given = self.num_moved = self.num_lent = 0
        if shared.kept is not None and experts.device is None:
            shared.kept.slot_use = self._slot_use
        shared.slots_account.give_way = self.give_way

    def close(self) -> None:
        """Gives all memory back, at once, also where tensors over it are left."""
        self._shared.close()

    def as_dict(self) -> dict[str, float]:
        """What it did since it was made, and the slots that there are now."""
        kept = {} if self._shared.kept is None else self._shared.kept.as_dict()
        return {
            **kept,
            "num_slots": self._slots.num_live,
            "num_slots_lent": self.num_lent,
            "num_slots_given": self.num_given,
            "num_residents_moved": self.num_moved,
        }

    def give_way(self, num_bytes: int) -> None:
        """Take memory from the coldest experts' slots, down to those that every step needs."""
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

    def note_pass(self, num_prompt_rows: int, prompt_s: float) -> None:
        """Note rows and seconds of passes over prompts alone; called before `settle`.

        By them kept keys are weighed against slots.
        """
        if (kept := self._shared.kept) is None:
            return
        experts = self._experts
        kept.note_pass(
            num_prompt_rows, prompt_s, experts.stats.num_misses, experts.host.stats.wait_s
        )
        if kept.num_passes % _LOOK_PASSES == 0:
            self._shared.cache.apply_rule()

    def settle(self) -> None:
        """After a pass: lends to the slots what sequences will not want soon."""
        self.follow_free_memory()
        if self._shared.room is not None:
            self._shared.room.trim()
        others_bytes = self._shared.others_bytes
        growth_bytes = max(0, others_bytes - self._others_bytes)
        self._others_bytes = others_bytes
        self._growth_bytes += _NEWEST * (growth_bytes - self._growth_bytes)
        self._patient_steps_left = max(0, self._patient_steps_left - 1)
        num_live = self._num_worth_having()
        if num_live > self._slots.num_live and not self._patient_steps_left and not self._is_short:
            self._lend(num_live)
        self._fill()

    def follow_free_memory(self) -> None:
        """Give memory back where the system runs short of it, and draw on it again later.

        Runs between passes and while a server is idle. Kept keys go first, then the coldest
        experts' slots.
        """
        if time.monotonic() < self._looked_s + _LOOK_S:
            return
        self._looked_s = time.monotonic()
        budget, spare_bytes = self._shared.budget, available_memory_bytes() - SYSTEM_BYTES
        if spare_bytes < 0:
            budget.ask(-spare_bytes)
            drawn_bytes = budget.num_bytes - budget.num_free_bytes
            budget.num_bytes = max(self._least_bytes, drawn_bytes)
            self._is_short = True
        elif spare_bytes > SYSTEM_BYTES:
            self._is_short = False
            budget.num_bytes = min(self._most_bytes, budget.num_bytes + spare_bytes - SYSTEM_BYTES)

    def restore(self) -> None:
        """Brings the planned slots back, for a policy that begins again with as many.

        Raises PageError where the system has less than the budget.
        """
        if self._slots.num_live < self._shared.tier.num_slots:
            self._slots.grow(self._shared.tier.num_slots)

    def _lend(self, num_live: int) -> None:
        count = num_live - self._slots.num_live
        try:
            self._slots.grow(num_live)
        except PageError:  # the system has less than the budget: what there is has to do
            self._patient_steps_left = _PATIENCE_STEPS
        else:
            self.num_lent += count

    def _fill(self) -> None:
        """Lets residents have what slots there are beside those that experts pass through."""
        capacity = self._experts.capacity
        num_residents = int(capacity.per_layer.sum())
        count = min(self._slots.num_live - self._num_staging, self._use.mean.size) - num_residents
        if count > 0:
            capacity.change(grown(capacity.per_layer, self._residents(), self._use.mean, count))

    def _num_worth_having(self) -> int:
        """Live slots that would pay now."""
        slots, free_bytes = self._slots, self._shared.budget.num_free_bytes
        num_new = free_bytes // self._shared.tier.slot_bytes
        if not num_new or slots.num_live == self._shared.num_slots:
            return slots.num_live
        lent_bytes = worth_lending(free_bytes, self._growth_bytes, self._absent_use(num_new))
        return slots.num_within(slots.num_bytes(slots.num_live) + lent_bytes)

    def _slot_use(self, num_bytes: int) -> float:
        """See `KeptRoom`."""
        shared, slot_bytes = self._shared, self._shared.tier.slot_bytes
        if self._is_short or self._patient_steps_left:  # no slot can be made now
            return 0.0
        if self._slots.num_live == shared.num_slots or shared.budget.num_free_bytes >= slot_bytes:
            return 0.0
        return self._absent_use(max(1, num_bytes // slot_bytes))

    def _absent_use(self, num_new: int) -> float:
        """In which share of passes each of so many more residents would save a read."""
        absent = self._use.mean[~self._residents()]
        num_cold = max(0, len(absent) - num_new)
        hottest = np.partition(absent, num_cold)[num_cold:] if num_cold else absent
        return float(hottest.mean())

    def _make_room(self, num_live: int) -> None:
        """Leaves no more residents than so many slots have room for."""
        capacity = self._experts.capacity
        count = int(capacity.per_layer.sum()) - (num_live - self._num_staging)
        if count > 0:
            per_layer, evict = shrunk(capacity.per_layer, self._residents(), self._use.mean, count)
            for layer, expert in evict:
                self._tier.evict(layer, expert)
            capacity.change(per_layer)

    def _residents(self) -> BoolArray:
        """[layers, experts]."""
        ledger = self._tier.ledger
        return np.stack([ledger.is_resident(layer) for layer in range(ledger.num_layers)])


def kv_pages(budget: PageBudget, layout: KVLayout) -> KVPages:
    """Addresses for a KV cache, whose memory the budget has."""
    pages = HostPages(layout.address_bytes(SMALL_GROUP_BYTES), SMALL_GROUP_BYTES)
    account = budget.open("KV cache")
    return KVPages(ElasticArena(pages, account, layout.num_parts, available_memory_bytes), layout)
