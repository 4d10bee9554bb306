"""A tier's expert slots, whose number follows its present memory.

A slot is seldom a whole number of page groups, so two slots may share a group. Live slots are
therefore always the first ones, and at most one group is shared with slots that are not live.

Shrinking copies each resident at the end within memory (6 MiB take about 0.3 ms, reading them again
2 ms). Growing copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lowtide.core import align_up
from lowtide.errors import InternalError
from lowtide.experts.slots import SlotLedger
from lowtide.memory.arena import PagedArena


class PagedSlots:
    """Live slots of a tier, with memory for exactly those.

    Does not choose which experts are evicted: its caller frees slots before it shrinks. Used
    between steps only, on the thread that owns the slots.
    """

    def __init__(
        self, arena: PagedArena, slot_bytes: int, ledger: SlotLedger, num_live: int
    ) -> None:
        """Allocate memory for `num_live` slots.

        ledger: has as many slots, all free, as there can ever be. Raises PageError if there is too
        little memory.
        """
        self.arena = arena
        self._slot_bytes = slot_bytes
        self.ledger = ledger
        arena.commit(0, num_live * slot_bytes)
        self.num_live = num_live
        for slot in range(num_live, ledger.max_slots):
            ledger.retire(slot)

    def num_bytes(self, num_slots: int) -> int:
        """Return the memory of `num_slots` live slots, in whole groups."""
        return align_up(num_slots * self._slot_bytes, self.arena.group_bytes)

    def num_within(self, num_bytes: int) -> int:
        """Return the number of slots that fit into `num_bytes`."""
        whole_bytes = num_bytes // self.arena.group_bytes * self.arena.group_bytes
        return min(self.ledger.max_slots, whole_bytes // self._slot_bytes)

    def is_reached(self, copy: Callable[[int], None], source: Tensor) -> bool:
        """Return True if `copy(slot)` copies `source`, an image of a slot, into memory of the slot.

        Nothing is in the slots yet. Without a slot there is nothing to reach.
        """
        if not self.ledger.max_slots:
            return True
        slot = max(0, self.num_live - 1)
        start = slot * self._slot_bytes
        self.arena.commit(start, start + self._slot_bytes)  # there may be no live slot
        copy(slot)
        is_there = self._image(slot).equal(source)
        if not self.num_live:
            self.arena.release(0, self.arena.part_bytes)
        return is_there

    def grow(self, num_slots: int) -> None:
        """Make the first `num_slots` live; the new ones are free.

        Raises PageError, changing nothing, if there is no memory for them.
        """
        self.arena.commit(0, num_slots * self._slot_bytes)
        for slot in range(self.num_live, num_slots):
            self.ledger.restore(slot)
            self.num_live = slot + 1

    def shrink(self, num_slots: int) -> int:
        """Keep the first `num_slots` live, free the others' memory; return the residents copied.

        Slots beyond them must not be in use or being filled, and there must be as many free slots
        before them as residents beyond. Otherwise raises InternalError before anything has changed.
        """
        leaving = range(num_slots, self.num_live)
        self._check_can_leave(leaving)
        for slot in leaving:  # first, so that none of them is taken below
            if self.ledger.is_free(slot):
                self.ledger.retire(slot)
        residents = [slot for slot in leaving if self.ledger.is_bound(slot)]
        for slot in residents:
            self._move(slot)
        self.num_live = min(num_slots, self.num_live)
        self.arena.release(self.num_live * self._slot_bytes, self.arena.part_bytes)
        return len(residents)

    def _check_can_leave(self, leaving: range) -> None:
        ledger = self.ledger
        bound = [slot for slot in leaving if ledger.is_bound(slot)]
        num_free = sum(map(ledger.is_free, leaving))
        busy = [slot for slot in bound if ledger.is_leased(slot)]
        if busy or len(bound) + num_free < len(leaving):
            raise InternalError(
                f"Slots {leaving.start} to {leaving.stop} are to be retired, but "
                f"{len(leaving) - len(bound) - num_free} are taken and {len(busy)} leased."
            )
        num_room = ledger.num_free - num_free
        if len(bound) > num_room:
            raise InternalError(
                f"{len(bound)} residents leave their slots for {num_room} free ones."
            )

    def _move(self, slot: int) -> None:
        """Move an expert out of a slot that is retired, into one that stays."""
        target = self.ledger.take()
        self._image(target).copy_(self._image(slot))
        self.ledger.move(slot, target)
        self.ledger.retire(slot)

    def _image(self, slot: int) -> Tensor:
        start = slot * self._slot_bytes
        return self.arena.bytes[start : start + self._slot_bytes]
