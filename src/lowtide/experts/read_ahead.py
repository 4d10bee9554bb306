"""Reads the next layer's experts during the present layer's computation.

A pass over hundreds of tokens demands nearly every expert of every layer, so the next layer's
demand is known before its router has run. The same holds for the next pass' first layer, if passes
repeat over the same tokens. Arriving experts are used, kept or dropped like any other read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lowtide.core import NO_EXPERTS, Facts, IntArray, StepKind
from lowtide.experts.slots import SlotLedger
from lowtide.policies.reads_ahead import NEARLY_ALL
from lowtide.reading.file_reader import Ticket

_NO_LAYER = -1


class PendingRead(NamedTuple):
    """Read of an expert from disk into a taken slot."""

    layer: int
    expert: int
    slot: int
    ticket: Ticket


StartRead = Callable[[int, int], PendingRead]
"""Function that begins the read of a layer's expert into a free slot."""


class ReadAhead:
    """Reads for one coming layer, each in a taken slot, until they are claimed.

    They use free slots only: nothing is evicted for a guess, and no demanded expert waits for one,
    since the running layer has started all its reads by then.
    """

    def __init__(self, ledger: SlotLedger) -> None:
        self._ledger = ledger
        self._layer = _NO_LAYER
        self._waiting: deque[int] = deque()
        self._pending: deque[PendingRead] = deque()

    def __len__(self) -> int:
        """Return the number of taken slots."""
        return len(self._pending)

    def expect(self, facts: Facts, run: Facts | None = None) -> None:
        """Record the running layer's demand, to predict the next layer's reads.

        facts: the demand of its router. run: the demand after a substitution, if any, which is
        expected of the next layer, too.
        """
        self._layer = self._next_layer(facts)
        self._waiting = deque(self._expected(facts, run).tolist())

    def start_reads(self, start: StartRead) -> bool:
        """Start reads of expected experts into free slots; True if some still wait for a slot."""
        while self._waiting and self._ledger.num_free:
            self._pending.append(start(self._layer, self._waiting.popleft()))
        return bool(self._waiting)

    def claim(self) -> list[PendingRead]:
        """Hand over all reads, oldest first; their slots stay taken."""
        pending, self._pending = self._pending, deque()
        self._waiting.clear()
        return list(pending)

    def _next_layer(self, facts: Facts) -> int:
        """Return the next layer; after the last one the first, if passes are repeated."""
        num_layers = self._ledger.num_layers
        if facts.layer + 1 < num_layers:
            return facts.layer + 1
        step = facts.step
        is_repeated = step.kind is StepKind.DENOISE and not step.is_last  # a prompt is read once
        return 0 if is_repeated and num_layers > 1 else _NO_LAYER

    def _expected(self, facts: Facts, run: Facts | None) -> IntArray:
        demand = (run or facts).demand
        is_demanding = len(demand.experts) >= NEARLY_ALL * self._ledger.num_experts
        if self._layer == _NO_LAYER or not is_demanding:
            return NO_EXPERTS
        if run is not None and demand.is_resident.all():  # absent experts were replaced
            return NO_EXPERTS
        return np.flatnonzero(~self._ledger.is_resident(self._layer))


class LateReads:
    """Reads of experts to be resident in their layer's next step; nothing waits for them.

    Each uses the slot that its layer gave up for it.
    """

    def __init__(self, ledger: SlotLedger) -> None:
        self._ledger = ledger
        self._waiting: deque[tuple[int, int]] = deque()  # layer, expert
        self._pending: dict[int, list[PendingRead]] = {}  # by layer
        self.num_forgotten = 0  # experts, until they are counted

    @property
    def layers(self) -> list[int]:
        """List the layers with running reads."""
        return list(self._pending)

    @property
    def experts(self) -> list[tuple[int, int]]:
        """List the expected experts as (layer, expert), with a running read or without."""
        running = [(layer, read.expert) for layer, reads in self._pending.items() for read in reads]
        return [*self._waiting, *running]

    def expect(self, layer: int, experts: IntArray) -> None:
        """Add experts for a layer's next step."""
        self._waiting.extend((layer, expert) for expert in experts.tolist())

    def start_reads(self, start: StartRead) -> bool:
        """Give free slots that no demanded expert needs to waiting reads; True if some wait on."""
        while self._waiting and self._ledger.num_free:
            read = start(*self._waiting.popleft())
            self._pending.setdefault(read.layer, []).append(read)
        return bool(self._waiting)

    def end(self, layer: int) -> list[PendingRead]:
        """Return a layer's reads, for the caller to wait for; forgets those without a slot."""
        num_waiting = len(self._waiting)
        self._waiting = deque(each for each in self._waiting if each[0] != layer)
        self.num_forgotten += num_waiting - len(self._waiting)
        return self._pending.pop(layer, [])

    def forget(self) -> None:
        """Recover from a failure: forget all; the caller waits for running reads."""
        self.num_forgotten += len(self.experts)
        self._waiting.clear()
        self._pending.clear()
