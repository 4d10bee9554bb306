"""Host tier: experts in host memory, their uses, and reads of absent experts.

It works the same with and without a device above it. Either all experts stay in host memory, or
some do, and the others are read from disk when a layer needs them.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from time import monotonic

import numpy as np

from lowtide.core import NO_EXPERTS, NO_MOVES, Demand, Facts, IntArray, Moves, Step
from lowtide.errors import DeviceError, LowtideError, StorageError, UsageError
from lowtide.experts.capacity import Capacity
from lowtide.experts.read_ahead import LateReads, PendingRead, ReadAhead
from lowtide.experts.slots import ExpertSlots, SlotLedger
from lowtide.experts.stats import HostStats
from lowtide.experts.transfer import Transfer
from lowtide.policies.decision import Policies
from lowtide.progress import Progress
from lowtide.reading.file_reader import Ticket, read_stalled
from lowtide.threads.event import INTERRUPT_POLL_S, WAIT_LIMIT_S, Event

USE_POLL_S = 1e-3
"""Interval of polling for the end of uses that do not report it: a device's."""

CLOSING_PASS_S = 1.0
"""Seconds that a running pass may wait for reads while its model is closed."""

END_LIMIT_S = 2.0
"""Seconds to wait for reads after a failure; longer reads keep their slots until they end."""


class HostTier:
    """Host slots and the reads into them; slots change owner on the calling thread only.

    With a device above it, it has policies of its own or keeps every expert. Without one, moves
    come from the runtime.
    """

    def __init__(
        self,
        slots: ExpertSlots,
        ledger: SlotLedger,
        transfer: Transfer,
        policies: Policies | None = None,
        is_permanent: bool = False,
    ) -> None:
        """Combine slots and transfer. is_permanent: once loaded, every expert stays.

        The end of a use then need not be reported. `capacity`: of its own policies, if any.
        """
        self.slots = slots
        self.ledger = ledger
        self.transfer = transfer
        self._policies = policies
        self.capacity = Capacity(NO_EXPERTS if policies is None else policies.capacity)
        # How often each expert was needed here since `take_wanted`, with policies of its own.
        self._wanted: IntArray = np.zeros((ledger.num_layers, ledger.num_experts), np.int64)
        self.is_permanent = is_permanent
        self.stats = HostStats()
        self.reads_ahead = policies is None and not is_permanent  # nothing is above it
        self.read_ahead = ReadAhead(ledger)
        self.late = LateReads(ledger)
        # Slots that reads write to; no ticket: Ctrl-C may have come before it.
        self._filling: dict[int, Ticket | None] = {}
        self._set_aside: dict[int, Ticket] = {}  # of them, those that nothing waits for
        self.news = threading.Event()  # a read or a computation has ended since it was cleared
        self.idle_s = 0.0  # waited without news and without progress
        self.wants_slots = False  # whether a slot that is given back is news
        self._uses: deque[tuple[int, Event]] = deque()
        self._returned: deque[int] = deque()  # slots whose use on another thread has ended
        self._shared: dict[int, int] = {}  # further uses of slots of experts that are not resident
        self._evict_after: dict[int, tuple[int, int]] = {}  # slot: its (layer, expert)
        self._waits_until_s = math.inf

    @property
    def num_set_aside(self) -> int:
        """Number of abandoned slots that are blocked until reads into them end."""
        return len(self._set_aside)

    def lease(self, layer: int, expert: int) -> int:
        """Return the slot of a present expert; `used_by` or `give_back` must follow."""
        slot = self.ledger.slot_of(layer, expert)
        if not self.is_permanent:
            self.ledger.lease(slot)
        return slot

    def share(self, slot: int) -> None:
        """Add a use to a used slot; `used_by` or `give_back` must follow for each."""
        if self.is_permanent:
            return
        if self.ledger.is_bound(slot):
            self.ledger.lease(slot)
        else:
            self._shared[slot] = self._shared.get(slot, 0) + 1

    def used_by(self, slot: int, use: Event) -> None:
        """Keep the slot's bytes unchanged until `use` is done."""
        if not self.is_permanent:
            self._uses.append((slot, use))

    def give_back(self, slot: int) -> None:
        """Record the end of a slot's use; thread-safe."""
        if not self.is_permanent:
            self._returned.append(slot)
        self.idle_s = 0.0
        if self.wants_slots:
            self.news.set()

    def wait(self, stalled: Callable[[], LowtideError], limit_s: float = WAIT_LIMIT_S) -> None:
        """Wait for `news`, at most `limit_s`.

        Raises `stalled` if none comes for long, and UsageError some time after `stop_waiting`.
        """
        # Several waits: one may have elapsed while the process was stopped.
        limit_s = min(
            limit_s, USE_POLL_S if self._uses else min(INTERRUPT_POLL_S, WAIT_LIMIT_S / 2)
        )
        self.idle_s = 0.0 if self.news.wait(limit_s) else self.idle_s + limit_s
        self.check_open()
        if self.idle_s >= WAIT_LIMIT_S:
            raise stalled()

    def own_moves(self, step: Step, layer: int, wanted: IntArray) -> Moves:
        """Return the moves of the tier's own policies; empty if it has none.

        wanted: experts whose bytes are needed here, ascending.
        """
        self.settle()
        if self._policies is None:
            return NO_MOVES
        self._wanted[layer, wanted] += 1
        capacity, costs = self.capacity.per_layer, self._policies.costs
        is_resident = self.ledger.is_resident(layer)
        demand = Demand(wanted, np.ones_like(wanted), is_resident[wanted])
        facts = Facts(
            step, layer, demand, is_resident, capacity, costs, can_fetch=False, has_idle_link=False
        )
        return self._policies.placement.update(facts)

    def take_wanted(self) -> IntArray:
        """Return how often each expert was needed here [layers, experts] since the last call."""
        wanted, self._wanted = self._wanted, np.zeros_like(self._wanted)
        return wanted

    def arrive(self, layer: int) -> None:
        """Finish the reads of experts that were admitted for this layer's step."""
        for read in self.late.end(layer):
            self.take_in(read)
            if self.ledger.has(layer, read.expert):
                self.ledger.drop(read.slot)
            else:
                self.bind(read)
        self._count_dropped(self.late.num_forgotten)

    def settle(self) -> None:
        """Free the slots whose uses are done, and those of ended reads that nothing waits for."""
        while self._returned:
            self._release(self._returned.popleft())
        for slot in [slot for slot, ticket in self._set_aside.items() if ticket.done()]:
            del self._set_aside[slot]
            self.ledger.drop(slot)
        for _ in range(len(self._uses)):
            slot, use = self._uses.popleft()
            if use.is_done():
                self._release(slot)
            else:
                self._uses.append((slot, use))

    def pause(self) -> None:
        """Between passes: end reads for a coming layer, so that no slot is being filled.

        Raises StorageError when one does not end.
        """
        for layer in self.late.layers:
            self.arrive(layer)
        self.claim(-1, ())
        if self._set_aside and wait(self._set_aside.values(), WAIT_LIMIT_S).not_done:
            raise self._stalled_aside()
        self.settle()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Pause; nothing uses or fills a slot within the context."""
        self.pause()
        yield

    def wait_for_use(self) -> bool:
        """Wait for the end of a use reported by `used_by`, or of a read that nothing waits for.

        False if there is nothing to wait for.
        """
        if self._uses:
            self._uses[0][1].wait()
        elif self._set_aside:
            self.wait(self._stalled_aside)
        return bool(self._uses or self._set_aside)

    def load(self, initial: Sequence[IntArray], progress: Progress) -> None:
        """Make exactly `initial[layer]` resident, before the first step.

        Raises StorageError when an expert cannot be read; `abandon` must follow then.
        """
        missing = [(i, expert) for i, kept in enumerate(initial) for expert in self.keep(i, kept)]
        total_bytes, done_bytes = len(missing) * self.slots.layout.num_bytes, 0
        for read in [self.start_read(layer, expert) for layer, expert in missing]:
            self.take_in(read)
            self.bind(read)
            done_bytes += self.slots.layout.num_bytes
            progress("loading experts", done_bytes, total_bytes)

    def load_all(self, progress: Progress) -> None:
        """Make every expert resident; raises what `load` raises."""
        everyone = np.arange(self.ledger.num_experts)
        self.load([everyone] * self.ledger.num_layers, progress)

    def keep(self, layer: int, experts: IntArray) -> list[int]:
        """Evict all residents of a layer but `experts`; return those of them that are absent."""
        is_resident = self.ledger.is_resident(layer)
        for expert in np.setdiff1d(np.flatnonzero(is_resident), experts).tolist():
            self.evict(layer, expert)
        absent: list[int] = experts[~is_resident[experts]].tolist()
        return absent

    def bind(self, read: PendingRead) -> None:
        """Make an expert resident that has been read."""
        self.ledger.bind(read.layer, read.expert, read.slot)
        self.stats.num_admitted += 1

    def evict(self, layer: int, expert: int) -> None:
        """Evict an expert, now or after its last use."""
        slot = self.ledger.slot_of(layer, expert)
        if self.ledger.is_leased(slot):
            self._evict_after[slot] = (layer, expert)
        else:
            self.ledger.evict(layer, expert)
            self.stats.num_evicted += 1

    def abandon(self) -> None:
        """Recover from a failure, when nothing uses a slot: free all slots but the residents'.

        Slots of reads that do not end within `END_LIMIT_S` stay blocked.
        """
        self.stats.num_wasted += len(self.read_ahead.claim())
        self.late.forget()
        self._count_dropped(self.late.num_forgotten)
        if self._end_reads(self.end_limit_s):
            self.transfer.drain()
        else:  # when a read without a ticket has ended is never known
            lost = [slot for slot, ticket in self._filling.items() if ticket is None]
            self._set_aside.update((slot, Future()) for slot in lost)
        self._uses.clear()
        self._returned.clear()
        self._shared.clear()
        self.ledger.reclaim(self._set_aside)
        for layer, expert in self._evict_after.values():
            if self.ledger.has(layer, expert):  # not so where Ctrl-C came just after its eviction
                self.evict(layer, expert)
        self._evict_after.clear()
        self._filling.clear()

    def start_for_later(self) -> bool:
        """Give free slots to experts read for another step; True if that needs more of them."""
        is_late = self.late.start_reads(self.start_read)
        num_begun = len(self.read_ahead)
        is_waiting = self.read_ahead.start_reads(self.start_read)
        self.stats.num_begun_ahead += len(self.read_ahead) - num_begun
        return is_waiting or is_late

    def stop_waiting(self) -> None:
        """Announce `close`: a pass may wait only `CLOSING_PASS_S` more for reads; thread-safe."""
        self._waits_until_s = monotonic() + CLOSING_PASS_S

    def check_open(self) -> None:
        """Raise UsageError some time after `stop_waiting`."""
        if monotonic() > self._waits_until_s:
            raise UsageError("This LLM is closed; make another one.")

    @property
    def end_limit_s(self) -> float:
        """Time to wait for reads after a failure."""
        return END_LIMIT_S if self._waits_until_s == math.inf else 0.0

    def close(self) -> None:
        """Wait for running reads, at most `END_LIMIT_S`; no other begins."""
        self.transfer.close()
        self._end_reads(END_LIMIT_S)

    def start_read(self, layer: int, expert: int) -> PendingRead:
        """Begin to read an expert into a free slot, which is then taken."""
        slot = self.ledger.take()
        self._filling[slot] = None
        self._filling[slot] = ticket = self.transfer.start(layer, expert, slot)
        ticket.add_done_callback(lambda _: self.news.set())
        return PendingRead(layer, expert, slot, ticket)

    def take_in(self, read: PendingRead) -> None:
        """Wait for a read; StorageError if it fails, or does not end."""
        end_s = monotonic() + WAIT_LIMIT_S
        while read.slot in self._filling:
            try:
                self.stats.read_bytes += read.ticket.result(min(INTERRUPT_POLL_S, WAIT_LIMIT_S))
                self.stats.num_read += 1
                del self._filling[read.slot]
            except TimeoutError:
                self.check_open()
                if monotonic() > end_s:
                    raise self.stalled(read) from None

    def set_aside(self, slot: int, ticket: Ticket) -> None:
        """Abandon a slot for whose read nothing waits; it is free once the read has ended."""
        self._set_aside[slot] = ticket

    def claim(self, layer: int, absent: Collection[int]) -> list[PendingRead]:
        """Return the reads of `absent` experts that began before their layer, oldest first.

        Other early reads are dropped: all of them if a pass was interrupted.
        """
        ahead = self.read_ahead.claim()
        begun = [read for read in ahead if read.layer == layer and read.expert in absent]
        for read in ahead:
            if read not in begun:  # no layer needs it: its slot is free once the read has ended
                self.stats.num_wasted += 1
                self.set_aside(read.slot, read.ticket)
                del self._filling[read.slot]
                read.ticket.cancel()
        self.settle()
        self.stats.num_ahead += len(begun)
        self.idle_s = 0.0
        return begun

    def _end_reads(self, limit_s: float) -> bool:
        """Cancel reads that have not begun; True if no slot is being filled.

        The slots of those that do not end are set aside.
        """
        filling = {slot: ticket for slot, ticket in self._filling.items() if ticket is not None}
        stuck = wait([each for each in filling.values() if not each.cancel()], limit_s).not_done
        self._set_aside.update((slot, each) for slot, each in filling.items() if each in stuck)
        self._set_aside = {s: each for s, each in self._set_aside.items() if not each.done()}
        return not self._set_aside

    def _count_dropped(self, num_moves: int) -> None:
        """Count experts that were to be resident, and are not."""
        self.late.num_forgotten = 0
        self.stats.num_moves_done -= num_moves
        self.stats.num_moves_dropped += num_moves

    def stalled(self, read: PendingRead) -> StorageError:
        """Return the error of a read that does not end."""
        return read_stalled(self.transfer.describe(read.layer, read.expert))

    def _stalled_aside(self) -> StorageError:
        return read_stalled("expert weights that an earlier pass asked for")

    def _release(self, slot: int) -> None:
        self.idle_s, ledger = 0.0, self.ledger
        if not ledger.is_bound(slot):
            uses_left = self._shared.pop(slot, 0)
            if not uses_left:
                ledger.drop(slot)
            elif uses_left > 1:
                self._shared[slot] = uses_left - 1
            return
        ledger.release(slot)
        if slot in self._evict_after and not ledger.is_leased(slot):
            self.evict(*self._evict_after.pop(slot))


def compute_stalled() -> DeviceError:
    return DeviceError(
        f"An expert on the host has not been computed within {WAIT_LIMIT_S:g} s: a compute thread "
        "hangs or the machine is far too busy."
    )
