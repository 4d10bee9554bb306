"""Slots of a tier that come and go with memory: by a budget, and by what the system has left."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from lowtide.core import BoolArray
from lowtide.experts.capacity import Capacity
from lowtide.experts.device_tier import DeviceTier
from lowtide.experts.host_tier import HostTier
from lowtide.experts.paged_slots import PagedSlots
from lowtide.hardware.memory import available_memory_bytes
from lowtide.memory.pages import PageBudget
from lowtide.policies.slot_lending import ExpertUse, grown, shrunk

SYSTEM_BYTES = 256 << 20
"""Free memory left to other programs: below it memory is returned to the system; above twice as
much, memory is taken again."""

LOOK_S = 1.0
"""Interval between checks of free memory."""


class MovingSlots:
    """Slots of a tier, and with them the number of residents that its policies may have.

    Used on the engine's thread, between passes or at the beginning of one.
    """

    def __init__(
        self,
        slots: PagedSlots,
        tier: HostTier | DeviceTier,
        num_staging: int,
        capacity: Callable[[], Capacity],
        at_rest: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Combine them.

        num_staging: slots that every step needs. capacity: returns that of the policies in force.
        at_rest: a context in which nothing uses or fills a slot.
        """
        self.slots = slots
        self.num_staging = num_staging
        self.use = ExpertUse(slots.ledger.num_layers, slots.ledger.num_experts)
        self._tier = tier
        self._capacity = capacity
        self._at_rest = at_rest
        self.num_given = self.num_moved = self.num_taken = 0

    def give_way(self, num_bytes: int) -> None:
        """Release memory of the coldest experts' slots, down to those that every step needs."""
        slots = self.slots
        left_bytes = max(0, slots.num_bytes(slots.num_live) - num_bytes)
        num_live = max(self.num_staging, slots.num_within(left_bytes))
        count = slots.num_live - num_live
        if count <= 0:
            return
        with self._at_rest():
            self._make_room(num_live)
            self.num_moved += slots.shrink(num_live)
        self.num_given += count

    def grow(self, num_live: int) -> None:
        """Take memory for slots up to `num_live`, which are free then. Raises PageError."""
        count = num_live - self.slots.num_live
        if count > 0:
            self.slots.grow(num_live)
            self.num_taken += count

    def fill(self) -> None:
        """Give residents all slots beyond the staging slots."""
        capacity = self._capacity()
        num_residents = int(capacity.per_layer.sum())
        count = min(self.slots.num_live - self.num_staging, self.use.mean.size) - num_residents
        if count > 0:
            capacity.change(grown(capacity.per_layer, self.residents(), self.use.mean, count))

    def residents(self) -> BoolArray:
        """Return the residents, bool [layers, experts]."""
        return self.slots.ledger.residents

    def _make_room(self, num_live: int) -> None:
        """Evict residents until the slots without the staging ones hold them."""
        capacity = self._capacity()
        count = int(capacity.per_layer.sum()) - (num_live - self.num_staging)
        if count > 0:
            per_layer, evict = shrunk(capacity.per_layer, self.residents(), self.use.mean, count)
            for layer, expert in evict:
                self._tier.evict(layer, expert)
            capacity.change(per_layer)


class FreeMemory:
    """Keeps a budget as large as the memory that the system can spare.

    `is_short`: whether the system has had memory back and has none to spare yet.
    """

    def __init__(self, budget: PageBudget, least_bytes: int) -> None:
        """least_bytes: the budget never becomes less."""
        self._budget = budget
        self._most_bytes, self._least_bytes = budget.num_bytes, least_bytes
        self._looked_s = 0.0
        self.is_short = False

    def follow(self) -> None:
        """Let the budget's owners release memory if the system runs short of it; allow it later.

        Looks once in a while only.
        """
        if time.monotonic() < self._looked_s + LOOK_S:
            return
        self._looked_s = time.monotonic()
        budget, spare_bytes = self._budget, available_memory_bytes() - SYSTEM_BYTES
        if spare_bytes < 0:
            budget.ask(-spare_bytes)
            drawn_bytes = budget.num_bytes - budget.num_free_bytes
            budget.num_bytes = max(self._least_bytes, drawn_bytes)
            self.is_short = True
        elif spare_bytes > SYSTEM_BYTES:
            self.is_short = False
            budget.num_bytes = min(self._most_bytes, budget.num_bytes + spare_bytes - SYSTEM_BYTES)
