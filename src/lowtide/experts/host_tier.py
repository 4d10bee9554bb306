"""The host tier: which experts are in host memory, who uses them, and reads of the others.

The same with a device above it and without one. All experts may lie in host memory for ever; else
some do, and the others are read from disk when a layer wants them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, MutableSequence, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np

from lowtide.core import NO_MOVES, Demand, Facts, IntArray, Moves, Step
from lowtide.experts.read_ahead import LateReads, PendingRead, ReadAhead, end_reads
from lowtide.experts.slots import ExpertSlots, SlotLedger
from lowtide.experts.transfer import Transfer, ticket_result
from lowtide.policies.decision import Policies
from lowtide.reading.dense_weights import Progress
from lowtide.threads.event import WAIT_LIMIT_S

LOOK_S = 1e-3
"""How often used experts' slots are looked for: about as long as one of many tokens takes."""


class Use(Protocol):
    """Something that reads a host slot for a while, and is not asked to say when it has ended."""

    def is_done(self) -> bool: ...

    def wait(self, limit_s: float = WAIT_LIMIT_S) -> None: ...


@dataclass
class HostStats:
    """What became of host slots, in counts, bytes and seconds since the tier was made."""

    num_admitted: int = 0
    num_evicted: int = 0
    num_ahead: int = 0  # of the experts read, those whose read began before their layer did
    num_wasted: int = 0  # reads that began before their layer did, for nothing
    read_bytes: int = 0
    wait_s: float = 0.0  # the calling thread stood still for a read


class HostTier:
    """Owns host slots and the reads into them; a slot changes hands on the calling thread only.

    With a device above it, it has policies of its own, or every expert stays for ever; without
    one it is told the moves.
    """

    def __init__(
        self,
        slots: ExpertSlots,
        ledger: SlotLedger,
        transfer: Transfer,
        policies: Policies | None = None,
        reads_ahead: bool = True,
        is_permanent: bool = False,
    ) -> None:
        """is_permanent: once loaded, every expert stays; nobody needs to say when a use ends."""
        self.slots = slots
        self.ledger = ledger
        self.transfer = transfer
        self._policies = policies
        self.is_permanent = is_permanent
        self.stats = HostStats()
        self.read_ahead = ReadAhead(ledger) if reads_ahead else None
        self._late = LateReads(ledger)
        self._begun: list[PendingRead] = []  # of the layer that is opened next
        self._uses: deque[tuple[int, Use]] = deque()
        self._returned: deque[int] = deque()  # slots whose use on another thread has ended
        self._evict_after: dict[int, tuple[int, int]] = {}  # slot: its (layer, expert)

    @property
    def num_ahead(self) -> int:
        """Slots that reads for a coming layer hold."""
        return 0 if self.read_ahead is None else len(self.read_ahead)

    def has(self, layer: int, expert: int) -> bool:
        """Whether an expert's bytes are in host memory now."""
        return bool(self.ledger.is_resident(layer)[expert])

    def lease(self, layer: int, expert: int) -> int:
        """The slot of an expert that is here; `used_by` or `give_back` follows."""
        slot = self.ledger.slot_of(layer, expert)
        if not self.is_permanent:
            self.ledger.lease(slot)
        return slot

    def used_by(self, slot: int, use: Use) -> None:
        """The slot's bytes must stay as they are until `use` is done."""
        if not self.is_permanent:
            self._uses.append((slot, use))

    def give_back(self, slot: int) -> None:
        """The use of a slot has ended; may be said on any thread."""
        if not self.is_permanent:
            self._returned.append(slot)

    def own_moves(self, step: Step, layer: int, wanted: IntArray) -> Moves:
        """The moves of the tier's own policies for those whose bytes are wanted here, ascending;
        none where it has none."""
        self.settle()
        if self._policies is None:
            return NO_MOVES
        capacity, costs = self._policies.capacity, self._policies.costs
        is_resident = self.ledger.is_resident(layer)
        demand = Demand(wanted, np.ones_like(wanted), is_resident[wanted])
        facts = Facts(
            step, layer, demand, is_resident, capacity, costs, can_fetch=False, has_idle_link=False
        )
        return self._policies.placement.update(facts)

    def arrive(self, layer: int) -> None:
        """Before a layer's step: who was to come for later is there. Waits for their reads."""
        for read in self._late.end(layer):
            self.stats.read_bytes += ticket_result(read.ticket)
            if self.has(layer, read.expert):
                self.ledger.drop(read.slot)
            else:
                self.bind(layer, read)

    def begin(self, layer: int, wanted: IntArray) -> None:
        """Starts reads of those of `wanted` (ascending) that are absent, as many as there are free
        slots for: they have to come, whatever is decided of who stays. `open` goes on with them."""
        absent: list[int] = wanted[~self.ledger.is_resident(layer)[wanted]].tolist()
        if not absent:
            return
        self.settle()
        self._begun = self._claim(layer, absent)
        for expert in absent[: self.ledger.num_free]:
            self._begun.append(self._start_read(layer, expert))

    def open(self, layer: int, wanted: IntArray, moves: Moves) -> HostReads:
        """Experts that this layer's step needs in host memory; `wanted` ascend."""
        return HostReads(self, layer, wanted, moves)

    def expect_next(self, facts: Facts, run: Facts | None) -> None:
        """Told of the layer that runs now, whose own reads are open: see `ReadAhead.expect`."""
        if self.read_ahead is not None:
            self.read_ahead.expect(facts, run)

    def settle(self) -> None:
        """Gives back the slots whose uses are done."""
        while self._returned:
            self._release(self._returned.popleft())
        for _ in range(len(self._uses)):
            slot, use = self._uses.popleft()
            if use.is_done():
                self._release(slot)
            else:
                self._uses.append((slot, use))

    def pause(self) -> None:
        """Between passes: ends reads for a coming layer, so that no slot is being filled."""
        for layer in self._late.layers:
            self.arrive(layer)
        if self.read_ahead is not None:
            self.stats.num_wasted += len(self.read_ahead)
            self.read_ahead.claim(-1, ())
        self.settle()

    def wait_for_use(self) -> bool:
        """Waits for the end of a use that was told by `used_by`, unless a slot was given back
        meanwhile; False where there is nothing to wait for."""
        if self._returned:
            return True
        if self._uses:
            self._uses[0][1].wait()
        return bool(self._uses)

    def load(self, initial: Sequence[IntArray], progress: Progress) -> None:
        """Makes `initial[layer]` resident and no others, before the first step.

        Raises StorageError when an expert cannot be read; `abandon` follows then.
        """
        missing = [(i, expert) for i, kept in enumerate(initial) for expert in self.keep(i, kept)]
        total_bytes, done_bytes = len(missing) * self.slots.layout.num_bytes, 0
        started = [(layer, self._start_read(layer, expert)) for layer, expert in missing]
        for layer, read in started:
            self.stats.read_bytes += ticket_result(read.ticket)
            self.bind(layer, read)
            done_bytes += self.slots.layout.num_bytes
            progress("loading experts", done_bytes, total_bytes)

    def load_all(self, progress: Progress) -> None:
        """Makes every expert resident; raises as `load` does."""
        everyone = np.arange(self.ledger.num_experts)
        self.load([everyone] * self.ledger.num_layers, progress)

    def keep(self, layer: int, experts: IntArray) -> list[int]:
        """Evicts all residents of a layer but `experts`; returns those of `experts` not here."""
        is_resident = self.ledger.is_resident(layer)
        for expert in np.setdiff1d(np.flatnonzero(is_resident), experts).tolist():
            self.evict(layer, expert)
        absent: list[int] = experts[~is_resident[experts]].tolist()
        return absent

    def bind(self, layer: int, read: PendingRead) -> None:
        """What was read is resident from now on."""
        self.ledger.bind(layer, read.expert, read.slot)
        self.stats.num_admitted += 1

    def evict(self, layer: int, expert: int) -> None:
        """Now, or after its last use."""
        slot = self.ledger.slot_of(layer, expert)
        if self.ledger.is_leased(slot):
            self._evict_after[slot] = (layer, expert)
        else:
            self.ledger.evict(layer, expert)
            self.stats.num_evicted += 1

    def abandon(self) -> None:
        """After a failure, when nothing uses a slot any more: gives all back but residents'."""
        if self.read_ahead is not None:
            self.read_ahead.cancel()
        self._late.cancel()
        for read in self._begun:
            read.ticket.cancel()
        self._begun = []
        self.transfer.drain()
        self._uses.clear()
        self._returned.clear()
        self.ledger.reclaim()
        for layer, expert in self._evict_after.values():
            if self.has(layer, expert):  # not so where Ctrl-C came just after its eviction
                self.evict(layer, expert)
        self._evict_after.clear()

    def _claim(self, layer: int, absent: MutableSequence[int]) -> list[PendingRead]:
        """Takes the reads that began before, and those experts out of `absent`."""
        begun, self._begun = self._begun, []
        if not begun and self.read_ahead is not None:
            num_ahead = len(self.read_ahead)
            begun = self.read_ahead.claim(layer, absent)
            self.stats.num_ahead += len(begun)
            self.stats.num_wasted += num_ahead - len(begun)
        for read in begun:
            absent.remove(read.expert)
        return begun

    def _start_read(self, layer: int, expert: int) -> PendingRead:
        slot = self.ledger.take()
        return PendingRead(expert, slot, self.transfer.start(layer, expert, slot))

    def _release(self, slot: int) -> None:
        ledger = self.ledger
        if not ledger.is_bound(slot):
            ledger.drop(slot)
            return
        ledger.release(slot)
        if slot in self._evict_after and not ledger.is_leased(slot):
            self.evict(*self._evict_after.pop(slot))


class HostReads:
    """One layer's experts in host memory, each in a slot that is leased or taken: those here, and
    the others as they are read. Whoever gets one says when its use ends, by `used_by` or
    `give_back`, before asking for the next."""

    def __init__(self, tier: HostTier, layer: int, wanted: IntArray, moves: Moves) -> None:
        self._tier = tier
        self._layer = layer
        self._admit = frozenset(moves.admit.tolist())
        self._admitted: list[int] = []
        is_here = tier.ledger.is_resident(layer)[wanted]
        self._waiting = deque(wanted[~is_here].tolist())
        self.here = [(expert, tier.lease(layer, expert)) for expert in wanted[is_here].tolist()]
        for expert in moves.evict.tolist():
            tier.evict(layer, expert)
        tier._late.expect(layer, moves.later)
        self._pending = deque(tier._claim(layer, self._waiting))

    @property
    def num_waiting(self) -> int:
        """Experts that wait for a slot."""
        return len(self._waiting)

    @property
    def has_more(self) -> bool:
        """Whether some have not come yet."""
        return bool(self._waiting or self._pending)

    def start(self) -> None:
        """Gives every free slot to an expert that waits for one, then to the next layer's."""
        tier = self._tier
        tier.settle()
        while self._waiting and tier.ledger.num_free:
            self._pending.append(tier._start_read(self._layer, self._waiting.popleft()))
        if self._waiting:
            return
        tier._late.start_reads(tier.transfer)
        if tier.read_ahead is not None:
            tier.read_ahead.start_reads(tier.transfer)

    def next(self) -> tuple[int, int] | None:
        """Waits for the oldest read: its expert and slot. None where all wait for a slot.

        Slots that come free meanwhile are given away, as by `start`. Raises StorageError when the
        expert cannot be read.
        """
        if not self._pending:
            return None
        read, stats = self._pending[0], self._tier.stats
        start_s = perf_counter()
        stats.read_bytes += self._end(read)
        stats.wait_s += perf_counter() - start_s
        self._pending.popleft()
        if read.expert in self._admit:
            self._tier.bind(self._layer, read)
            self._tier.ledger.lease(read.slot)
            self._admitted.append(read.expert)
        return read.expert, read.slot

    def bring(self, expert: int) -> tuple[int, int] | None:
        """`next`, for the read of one expert; None where it waits for a slot.

        Reads begin in ascending order: so should they be asked for.
        """
        for read in self._pending:
            if read.expert == expert:
                self._pending.remove(read)
                self._pending.appendleft(read)
                return self.next()
        return None

    def give_up_one(self) -> bool:
        """Evicts one that was admitted and used, for those that wait for a slot; whether it did.

        Where experts come in ascending order the residents that they replace may be in use for
        longer than there are slots for both.
        """
        tier = self._tier
        tier.settle()
        for expert in self._admitted:
            if not tier.ledger.is_leased(tier.ledger.slot_of(self._layer, expert)):
                self._admitted.remove(expert)
                tier.evict(self._layer, expert)
                return True
        return False

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """All of them, for somebody who tells of every use by `used_by`."""
        yield from self.here
        self.start()
        while self.has_more:
            arrived = self.next()
            if arrived is not None:
                yield arrived
            else:
                self._tier.wait_for_use()
            self.start()

    def cancel(self) -> None:
        """After a failure: no slot is written any more; `HostTier.abandon` gives them back."""
        end_reads(self._pending)

    def _end(self, read: PendingRead) -> int:
        """Waits for a read, and gives away the slots that come free meanwhile; bytes read."""
        end_s = perf_counter() + WAIT_LIMIT_S
        while self._wants_slots and perf_counter() < end_s:
            with suppress(TimeoutError):
                return read.ticket.result(LOOK_S)
            self.start()
        return ticket_result(read.ticket)

    @property
    def _wants_slots(self) -> bool:
        read_ahead = self._tier.read_ahead
        return bool(self._waiting) or (read_ahead is not None and read_ahead.is_waiting)
