"""Host slots beside a device: what the system lacks leaves them, and comes back later.

Keys, values and workspace are in the device's memory, so that only other programs want these slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lowtide.core import MoEShape
from lowtide.engine.planning.budget_division import group_bytes
from lowtide.engine.running.moving_slots import FreeMemory, MovingSlots
from lowtide.errors import PageError
from lowtide.experts.device_tier import DeviceTier
from lowtide.experts.host_tier import HostTier
from lowtide.experts.paged_slots import PagedSlots
from lowtide.experts.slots import SlotLedger
from lowtide.hardware.memory import available_memory_bytes
from lowtide.memory.arena import PagedArena, Region
from lowtide.memory.host_pages import HostPages
from lowtide.memory.pages import PageBudget
from lowtide.plan import TierPlan

Pin = Callable[[Region, int], object]
"""Has a device copy fast from the first bytes of a region, and from no others of it."""


def home_slots(tier: TierPlan, shape: MoEShape, pin: Pin) -> PagedSlots:
    """Make the planned host slots. Raises PageError if the system lacks memory for them."""
    num_bytes = tier.num_slots * tier.slot_bytes
    pages = HostPages(num_bytes, group_bytes(num_bytes))
    account = PageBudget(pages.num_bytes).open("host slots")
    arena = PagedArena(pages, account, free_bytes=available_memory_bytes)
    ledger = SlotLedger(shape.num_layers, shape.num_experts, tier.num_slots)
    slots = PagedSlots(arena, tier.slot_bytes, ledger, tier.num_slots)
    pin(arena, slots.num_bytes(tier.num_slots))
    return slots


class HomeMemory:
    """Moves the memory of host slots beside a device to the system and back.

    Used on the engine's thread, between passes.
    """

    def __init__(
        self, slots: PagedSlots, host: HostTier, device: DeviceTier, num_staging: int, pin: Pin
    ) -> None:
        """host: uses the slots. num_staging: those through which absent experts stream."""
        self.slots = slots
        self._host, self._device = host, device
        self._pin = pin
        self._moving = MovingSlots(slots, host, num_staging, lambda: host.capacity, self.at_rest)
        self._account = slots.arena.account
        self._free = FreeMemory(self._account.budget, slots.num_bytes(num_staging))
        self._account.give_way = self._moving.give_way

    @property
    def held_bytes(self) -> int:
        """Bytes that the slots hold at this moment; on any thread."""
        return self._account.num_bytes

    def as_dict(self) -> dict[str, float]:
        """Return counters since loading, and the present number of slots."""
        moving = self._moving
        return {
            "num_host_slots": self.slots.num_live,
            "num_host_slots_lent": moving.num_taken,
            "num_host_slots_given": moving.num_given,
            "num_host_residents_moved": moving.num_moved,
        }

    def settle(self) -> None:
        """Adjust after a pass."""
        self._moving.use.saw(self._host.take_wanted())
        self.follow_free_memory()

    def follow_free_memory(self) -> None:
        """Return memory if the system runs short of it, and take it again later."""
        self._free.follow()
        num_live = self.slots.num_within(self._account.budget.num_bytes)
        if num_live > self.slots.num_live and not self._free.is_short:
            try:
                with self.at_rest():
                    self._moving.grow(num_live)
            except PageError:  # the system has less than it said: until it has more, that is all
                self._account.budget.num_bytes = self._account.num_bytes
                return
            self._moving.fill()

    def close(self) -> None:
        """Release all memory, once the device is closed."""
        self._account.give_way = None
        self.slots.arena.close()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Let no copy or read be under way; pin again what the slots have then."""
        self._device.pause()
        self._host.pause()
        arena, slots = self.slots.arena, self.slots
        self._pin(arena, 0)
        try:
            yield
        finally:
            self._pin(arena, slots.num_bytes(slots.num_live))
