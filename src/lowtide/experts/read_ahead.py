"""Reads of the next layer's experts, begun under the present layer's computation.

A pass over hundreds of tokens hits nearly every expert of every layer, so what the next layer will
ask for is known before its router has run; and so is what the next pass's first layer will, where
passes go over the same tokens again and again. Decides nothing about residence: what arrives is
that layer's to use, keep or drop, as any other read.
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
    """An expert on its way from disk into a taken slot."""

    layer: int
    expert: int
    slot: int
    ticket: Ticket


StartRead = Callable[[int, int], PendingRead]
"""Begins the read of a layer's expert into a free slot."""


class ReadAhead:
    """Owns reads for one coming layer, each in a taken slot, until they are claimed.

    Takes free slots only: nothing is evicted for a guess, and no demanded expert waits for one
    (the layer that runs has started all its reads by then).
    """

    def __init__(self, ledger: SlotLedger) -> None:
        self._ledger = ledger
        self._layer = _NO_LAYER
        self._waiting: deque[int] = deque()
        self._pending: deque[PendingRead] = deque()

    def __len__(self) -> int:
        """Slots that are taken."""
        return len(self._pending)

    def expect(self, facts: Facts, run: Facts | None = None) -> None:
        """Told of the layer that runs now: what to read of the next one while it is computed.

        facts: of what its router asked for; run: of what a substitution made of that, if one did.
        So it will in the next layer.
        """
        self._layer = self._next_layer(facts)
        self._waiting = deque(self._expected(facts, run).tolist())

    def start_reads(self, start: StartRead) -> bool:
        """Gives every free slot to an expert that is expected to be demanded; whether some wait."""
        while self._waiting and self._ledger.num_free:
            self._pending.append(start(self._layer, self._waiting.popleft()))
        return bool(self._waiting)

    def claim(self) -> list[PendingRead]:
        """Hands over all its reads, oldest first; their slots stay taken."""
        pending, self._pending = self._pending, deque()
        self._waiting.clear()
        return list(pending)

    def _next_layer(self, facts: Facts) -> int:
        """After the last one the first one again, where passes are repeated."""
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
    """Owns reads of experts that are to be resident when their layer comes again, and that nothing
    waits for meanwhile. Each has the slot that its layer gave up for it.
    """

    def __init__(self, ledger: SlotLedger) -> None:
        self._ledger = ledger
        self._waiting: deque[tuple[int, int]] = deque()  # layer, expert
        self._pending: dict[int, list[PendingRead]] = {}  # by layer

    @property
    def layers(self) -> list[int]:
        """That have a read under way."""
        return list(self._pending)

    def expect(self, layer: int, experts: IntArray) -> None:
        """Who is to come for a layer's next step."""
        self._waiting.extend((layer, expert) for expert in experts.tolist())

    def start_reads(self, start: StartRead) -> bool:
        """Gives free slots to those that wait for one, which no demanded expert does; whether
        some wait yet.
        """
        while self._waiting and self._ledger.num_free:
            read = start(*self._waiting.popleft())
            self._pending.setdefault(read.layer, []).append(read)
        return bool(self._waiting)

    def end(self, layer: int) -> list[PendingRead]:
        """A layer's reads, for the caller to wait for; those without a slot are forgotten."""
        self._waiting = deque(each for each in self._waiting if each[0] != layer)
        return self._pending.pop(layer, [])

    def forget(self) -> None:
        """After a failure: those under way are the caller's to wait for."""
        self._waiting.clear()
        self._pending.clear()
