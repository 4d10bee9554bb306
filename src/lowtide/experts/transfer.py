"""Transfers of one expert's weights into a slot of the tier above.

A transfer returns a ticket when started; it is independent of layers' order, demand and residency.
Disk to host is here; copies to a device are in `link.py`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from lowtide.experts.layout import SlotLayout
from lowtide.experts.slots import ExpertSlots
from lowtide.formats.arranged import Arranged
from lowtide.formats.expert_inputs import ExpertInputs
from lowtide.kernels.cpu.reader import CompiledReader, Range, SlotSegment
from lowtide.reading.file_reader import (
    AnyRead,
    ArrayRead,
    FileReader,
    MatrixRead,
    Piece,
    Read,
    Ticket,
    Window,
    read_stalled,
)
from lowtide.schemas.schema import DOWN, SlotTarget
from lowtide.schemas.weights import MAX_GAP_BYTES, ExpertRange, ExpertTable
from lowtide.threads.event import WAIT_LIMIT_S

CLOSE_LIMIT_S = 2.0
"""Seconds to wait for the end of reads when a model is closed."""


class Transfer(Protocol):
    """Link between two tiers."""

    def start(self, layer: int, expert: int, slot: int) -> Ticket:
        """Begin to fill `slot` (taken, not yet bound) with an expert's weights; return at once.

        The ticket's result is the number of bytes moved; it raises StorageError on failure. The
        slot must stay taken until the ticket is done.
        """
        ...

    def describe(self, layer: int, expert: int) -> str:
        """Describe what `start` reads, for people."""
        ...

    def drain(self) -> None:
        """Wait until no slot is being filled; what has not begun may be given up."""
        ...

    def close(self) -> None:
        """Stop its own threads."""
        ...


class DiskTransfer:
    """Reads experts from the checkpoint's files into host slots.

    Compiled threads, if available, read parts that slots keep as stored.
    """

    def __init__(
        self,
        reader: FileReader,
        table: ExpertTable,
        slots: ExpertSlots,
        inputs: ExpertInputs | None = None,
        library: ctypes.CDLL | None = None,
        num_at_once: int | None = None,
    ) -> None:
        """Prepare the reads.

        Weights that are not in a slot's own format are converted; if rounded, for the least error
        on `inputs`. library: of compiled kernels. num_at_once: see `CompiledReader`.
        """
        self._reader = reader
        self._table = table
        self._slots = slots
        self._inputs = inputs
        self._num_experts = len(table.files[0])
        self.compiled: CompiledReader | None = None
        experts = None if library is None else _kept_ranges(table, slots.layout)
        if library is not None and experts is not None:
            files, ring = reader.lend()
            memory, slot_bytes = slots.memory, slots.layout.num_bytes
            self.compiled = CompiledReader(
                library, experts, files, memory, slot_bytes, ring, num_at_once
            )

    def drain(self) -> None:
        if self.compiled is not None:
            self.compiled.drain(WAIT_LIMIT_S)
        self._reader.drain()

    def close(self) -> None:
        """Stop its own threads; the targets of reads that have not ended are kept."""
        if self.compiled is not None:
            self.compiled.close(CLOSE_LIMIT_S)
            self.compiled = None

    def start(self, layer: int, expert: int, slot: int) -> Ticket:
        if self.compiled is None:
            return self._reader.submit(self._reads(layer, expert, slot))
        number = layer * self._num_experts + expert
        # Done once nothing writes to the slot any more; callers wait with a limit of their own.
        return self._reader.await_work(partial(self.compiled.read, number, slot, math.inf))

    def describe(self, layer: int, expert: int) -> str:
        numbers = dict.fromkeys(self._table.files[layer, expert].tolist())
        names = ", ".join(str(self._reader.files[number].path) for number in numbers)
        return f"expert {expert} of MoE layer {layer} from {names}"

    def _reads(self, layer: int, expert: int, slot: int) -> Sequence[AnyRead]:
        if self._table.targets is not None:
            return self._reads_of_targets(layer, expert, slot, self._table.targets)
        reads: list[AnyRead] = []
        for file, start, num_bytes, parts in self._table.ranges(layer, expert):
            pieces = tuple(self._piece(layer, expert, slot, *part) for part in parts)
            reads.append(Read(file, start, num_bytes, pieces))
        return reads

    def _reads_of_targets(
        self, layer: int, expert: int, slot: int, targets: Sequence[SlotTarget | None]
    ) -> list[AnyRead]:
        files = self._table.files[layer, expert].tolist()
        starts = self._table.offsets[layer, expert].tolist()
        places = list(zip(files, starts, strict=True))
        ranges = self._table.ranges(layer, expert)
        window = Window(*ranges[0][:3]) if len(ranges) == 1 else None
        reads: list[AnyRead] = []
        for part, target in enumerate(targets):
            if target is None:
                continue
            own = tuple(places[i] for i in (part, *target.others))
            name = self._table.name(layer, expert, part)
            stored = self._table.layers[layer].formats[part]
            kept = self._slots.layout.layers[layer].parts[target.first]
            if isinstance(stored, Arranged):
                content = self._slots.part(layer, slot, target.first)
                reads.append(
                    MatrixRead(name, own, stored, kept.shape, content, kept.format, window)
                )
            elif kept.format is stored:  # each of the format's tensors by itself
                for i, place in enumerate(own):
                    array = self._slots.in_file_order(layer, slot, target, i)
                    reads.append(ArrayRead((place,), stored, array, None, name))
            else:
                array = self._slots.in_file_order(layer, slot, target)
                reads.append(ArrayRead(own, stored, array, kept.format, name))
        return reads

    def _piece(self, layer: int, expert: int, slot: int, part: int, offset: int) -> Piece:
        stored, inputs, is_down = self._table.stored(layer, expert), self._inputs, part == DOWN
        target, target_format = self._slots.part_as(layer, slot, part, stored.formats[part])
        return Piece(
            offset=offset,
            num_bytes=stored.part_bytes[part],
            format=stored.formats[part],
            target=target,
            target_format=target_format,
            importance=None if inputs is None else inputs.importance(layer, expert, is_down),
        )


def _kept_ranges(table: ExpertTable, layout: SlotLayout) -> list[list[Range]] | None:
    """List the ranges to read of each expert, layer by layer; None if one is not kept as stored."""
    if table.targets is not None or table.odd:
        return None
    places = []
    for stored, of_slot in zip(table.layers, layout.layers, strict=True):
        if of_slot.tags is not None or len(stored.formats) != len(of_slot.parts):
            return None
        kept = zip(of_slot.parts, stored.formats, stored.part_bytes, strict=True)
        if any(part.format is not form or part.num_bytes != (size,) for part, form, size in kept):
            return None
        places.append([part.offsets[0] for part in of_slot.parts])
    num_layers, num_experts, _ = table.files.shape
    return [
        [_range(each, table.layers[layer].part_bytes, places[layer]) for each in of_expert]
        for layer in range(num_layers)
        for of_expert in (table.ranges(layer, expert) for expert in range(num_experts))
    ]


def _range(stored: ExpertRange, part_bytes: Sequence[int], places: Sequence[int]) -> Range:
    file, start, _, parts = stored
    segments = [
        SlotSegment(start + offset, part_bytes[part], places[part]) for part, offset in parts
    ]
    return Range(file, segments)


def ticket_result(ticket: Ticket) -> int:
    """Return the bytes moved; raise StorageError on failure or after `WAIT_LIMIT_S`."""
    try:
        return ticket.result(WAIT_LIMIT_S)
    except TimeoutError as error:
        raise read_stalled("expert weights") from error


def largest_read_bytes(table: ExpertTable) -> int:
    """Return an upper bound of an expert's contiguous read, including gaps between its parts."""
    return table.largest_expert_bytes + 2 * MAX_GAP_BYTES
