"""The host tier of a machine with a device: where experts are fetched from and computed at home.

Either all experts lie in host memory, or some do and the others are read from disk when wanted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from lowtide.core import Costs, Demand, Facts, Moves, Step
from lowtide.errors import InternalError
from lowtide.experts.slots import ExpertSlots, SlotLedger
from lowtide.experts.transfer import Transfer, ticket_result
from lowtide.policies.placement import Placement
from lowtide.reading.dense_weights import Progress
from lowtide.reading.file_reader import Ticket
from lowtide.threads.event import WAIT_LIMIT_S


class Use(Protocol):
    """Something that reads a host slot for a while: a computation or a copy."""

    def is_done(self) -> bool: ...

    def wait(self, limit_s: float = WAIT_LIMIT_S) -> None: ...


class Brought(NamedTuple):
    """Experts and their host slots: in host memory already, and as they are read."""

    here: Sequence[tuple[int, int]]
    coming: Iterator[tuple[int, int]]


class Home(Protocol):
    """Hands out host slots that hold experts, and is told how long they are needed."""

    slots: ExpertSlots
    read_bytes: int  # from disk, on demand

    def has(self, layer: int, expert: int) -> bool:
        """Whether an expert's bytes are in host memory now."""
        ...

    def bring(self, step: Step, layer: int, experts: Sequence[int]) -> Brought:
        """Every one of `experts`, each with its host slot; `used_by` follows for every one.

        For those that are coming it is said before the next one is asked for, which raises
        StorageError when an expert cannot be read.
        """
        ...

    def lease(self, layer: int, expert: int) -> int:
        """The slot of an expert that is here; `used_by` follows."""
        ...

    def used_by(self, slot: int, use: Use) -> None:
        """The slot's bytes must stay as they are until `use` is done."""
        ...

    def abandon(self) -> None:
        """After a failure, when nothing uses or fills a slot any more: forgets all uses."""
        ...


class HostHome:
    """All experts in host memory for ever, in order of layer and expert."""

    def __init__(self, slots: ExpertSlots, num_experts: int) -> None:
        self.slots = slots
        self.read_bytes = 0
        self._num_experts = num_experts

    def fill(self, transfer: Transfer, num_layers: int, progress: Progress) -> None:
        """Reads every expert; raises StorageError when one cannot be read."""
        tickets: deque[Ticket] = deque()
        total_bytes = num_layers * self._num_experts * self.slots.layout.num_bytes
        for layer in range(num_layers):
            for expert in range(self._num_experts):
                tickets.append(transfer.start(layer, expert, self.lease(layer, expert)))
        done_bytes = 0
        while tickets:
            ticket_result(tickets.popleft())
            done_bytes += self.slots.layout.num_bytes
            progress("loading experts", done_bytes, total_bytes)

    def has(self, layer: int, expert: int) -> bool:
        return True

    def bring(self, step: Step, layer: int, experts: Sequence[int]) -> Brought:
        return Brought([(expert, self.lease(layer, expert)) for expert in experts], iter(()))

    def lease(self, layer: int, expert: int) -> int:
        return layer * self._num_experts + expert

    def used_by(self, slot: int, use: Use) -> None:
        pass

    def abandon(self) -> None:
        pass


class _Arriving(NamedTuple):
    expert: int
    slot: int
    ticket: Ticket


class DiskHome:
    """Some experts in host memory, by a placement of its own; the others are read when wanted."""

    def __init__(
        self,
        slots: ExpertSlots,
        ledger: SlotLedger,
        transfer: Transfer,
        placement: Placement,
        capacity: Sequence[int],
    ) -> None:
        """`capacity`: residents of each layer, at most."""
        self.slots = slots
        self.ledger = ledger
        self.read_bytes = 0
        self._transfer = transfer
        self._placement = placement
        self._capacity = np.array(capacity, np.int64)
        self._costs = Costs.unknown(slots.layout.num_bytes)
        self._uses: deque[tuple[int, Use]] = deque()
        self._evict_after: dict[int, tuple[int, int]] = {}  # slot: its (layer, expert)

    def has(self, layer: int, expert: int) -> bool:
        return bool(self.ledger.is_resident(layer)[expert])

    def lease(self, layer: int, expert: int) -> int:
        slot = self.ledger.slot_of(layer, expert)
        self.ledger.lease(slot)
        return slot

    def used_by(self, slot: int, use: Use) -> None:
        self._uses.append((slot, use))

    def bring(self, step: Step, layer: int, experts: Sequence[int]) -> Brought:
        self._settle()
        is_here = self.ledger.is_resident(layer)
        here = [expert for expert in experts if is_here[expert]]
        waiting = deque(expert for expert in experts if not is_here[expert])
        moves = self._moves(step, layer, experts)
        leases = [(expert, self.lease(layer, expert)) for expert in here]
        for expert in moves.evict.tolist():
            self._evict(layer, expert)
        arriving: deque[_Arriving] = deque()
        self._start_reads(layer, waiting, arriving)
        return Brought(leases, self._arrivals(layer, waiting, arriving, moves.admit.tolist()))

    def _arrivals(
        self, layer: int, waiting: deque[int], arriving: deque[_Arriving], admit: Sequence[int]
    ) -> Iterator[tuple[int, int]]:
        while waiting or arriving:
            if not arriving:
                self._wait_for_slot()
            else:
                arrived = arriving.popleft()
                self.read_bytes += ticket_result(arrived.ticket)
                if arrived.expert in admit:
                    self.ledger.bind(layer, arrived.expert, arrived.slot)
                    self.ledger.lease(arrived.slot)
                yield arrived.expert, arrived.slot
            if waiting:
                self._settle()
                self._start_reads(layer, waiting, arriving)

    def abandon(self) -> None:
        self._uses.clear()
        self._transfer.drain()
        self.ledger.reclaim()
        for layer, expert in self._evict_after.values():
            if self.has(layer, expert):  # not so where Ctrl-C came just after its eviction
                self.ledger.evict(layer, expert)
        self._evict_after.clear()

    def _moves(self, step: Step, layer: int, experts: Sequence[int]) -> Moves:
        """The placement's moves for those whose bytes are wanted in host memory."""
        is_resident = self.ledger.is_resident(layer)
        wanted = np.array(sorted(experts), np.int64)
        demand = Demand(wanted, np.ones_like(wanted), is_resident[wanted])
        facts = Facts(
            step, layer, demand, is_resident, self._capacity, self._costs, has_idle_link=False
        )
        return self._placement.update(facts)

    def _evict(self, layer: int, expert: int) -> None:
        """Now, or after its last use."""
        slot = self.ledger.slot_of(layer, expert)
        if self.ledger.is_leased(slot):
            self._evict_after[slot] = (layer, expert)
        else:
            self.ledger.evict(layer, expert)

    def _start_reads(self, layer: int, waiting: deque[int], arriving: deque[_Arriving]) -> None:
        while waiting and self.ledger.num_free:
            expert, slot = waiting.popleft(), self.ledger.take()
            ticket = self._transfer.start(layer, expert, slot)
            arriving.append(_Arriving(expert, slot, ticket))

    def _wait_for_slot(self) -> None:
        if not self._uses:
            raise InternalError("Experts wait to be read and no host slot will come free.")
        self._uses[0][1].wait()

    def _settle(self) -> None:
        """Gives back the slots whose uses are done."""
        for _ in range(len(self._uses)):
            slot, use = self._uses.popleft()
            if use.is_done():
                self._give_back(slot)
            else:
                self._uses.append((slot, use))

    def _give_back(self, slot: int) -> None:
        ledger = self.ledger
        if not ledger.is_bound(slot):
            ledger.drop(slot)
            return
        ledger.release(slot)
        if slot in self._evict_after and not ledger.is_leased(slot):
            ledger.evict(*self._evict_after[slot])
            del self._evict_after[slot]
