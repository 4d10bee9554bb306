"""A CUDA device: expert slots in its memory, a copy stream, and experts computed from slots.

Copies have a stream of their own. Experts run on the caller's stream, between the work that it
queues before and after. Streams wait for each other's events on the device. The calling thread
waits only in `to_host`, or when a ring buffer is used up.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lowtide.core import IntArray, MoEShape, align_up
from lowtide.errors import InternalError
from lowtide.experts.device import ExpertGroup
from lowtide.experts.layout import ExpertLayout, SlotLayout
from lowtide.experts.rows import ExpertBuffers, ExpertRows
from lowtide.formats.plain import plain_format
from lowtide.kernels.choice import choose_kernels, why_no_triton
from lowtide.kernels.reference import REFERENCE
from lowtide.memory.cuda_streams import (
    CudaEvent,
    CudaStreams,
    PinnedRing,
    PinnedRow,
    Stream,
    Streams,
    device_error,
    plan_errors,
    wait_on,
)
from lowtide.memory.pinned import PinnedMemory
from lowtide.threads.event import Event
from lowtide.threads.executor import Work

if TYPE_CHECKING:
    from lowtide.kernels.triton_experts import SlotImage

_NUM_TABLES = 64  # launches that the calling thread may be ahead
_NUM_PIECES = 4
PIECE_BYTES = 4 << 20


def pinned_bytes(shape: MoEShape, layout: SlotLayout, max_rows: int) -> int:
    """Return a device's pinned host memory for steps of up to `max_rows` token rows.

    It includes the ring through which copies go if the experts' own memory cannot be pinned.
    """
    num_pairs = max_rows * shape.num_experts_per_token
    row_bytes = shape.hidden_size * layout.dtype.itemsize
    counts, tables = shape.num_experts * 8, _NUM_TABLES * shape.num_experts * 4
    pairs = align_up(num_pairs) * 4
    blocks = [num_pairs * row_bytes, max_rows * row_bytes, num_pairs * 8, pairs, counts, tables]
    blocks.append(_NUM_PIECES * _piece_bytes(layout))
    # torch's allocator of pinned memory rounds every block up to a power of two.
    return sum(1 << (num_bytes - 1).bit_length() for num_bytes in blocks)


def _piece_bytes(layout: SlotLayout) -> int:
    return min(PIECE_BYTES, layout.num_bytes)


class CudaDevice:
    """Owns the slots, as one tensor [num_slots, slot_bytes], and the copy stream."""

    def __init__(
        self,
        shape: MoEShape,
        layout: SlotLayout,
        num_slots: int,
        max_rows: int,
        pinned: PinnedMemory,
        kernels: str = "auto",
        streams: Streams | None = None,
    ) -> None:
        """Reserve the device's memory.

        max_rows: token rows of the largest step. pinned: memory that copies read from. kernels:
        `auto` (Triton's if these experts have any) or `reference`. Raises PlanError if the GPU or
        the system has too little memory.
        """
        self._streams = CudaStreams() if streams is None else streams
        self.torch_device = self._streams.torch_device
        self.num_slots = num_slots
        self.kernels = choose_kernels(kernels, layout.dtype, self.torch_device)
        self._pinned = pinned
        self._piece_bytes = _piece_bytes(layout)
        self._is_closed = False
        num_pairs = max_rows * shape.num_experts_per_token
        with plan_errors(num_slots * layout.num_bytes, f"GPU memory for {num_slots} slots"):
            slots = torch.empty(
                (num_slots, layout.num_bytes), dtype=torch.uint8, device=self.torch_device
            )
        with plan_errors(pinned_bytes(shape, layout, max_rows), "pinned host memory"):
            self._host_parts = self._streams.pinned((num_pairs, shape.hidden_size), layout.dtype)
            self._host_x = self._streams.pinned((max_rows, shape.hidden_size), layout.dtype)
            shape_of_experts = (max_rows, shape.num_experts_per_token)
            self._host_experts = self._streams.pinned(shape_of_experts, torch.int64)
            self._host_predicted = self._streams.pinned((shape.num_experts,), torch.int64)
        # The slots' memory may have been another's, whose last use is still queued.
        self._streams.copies.wait_event(self._streams.current.record_event())
        self._slots = [slots[slot] for slot in range(num_slots)]  # views, made once
        with plan_errors(num_pairs * 12, "GPU memory for tables"):
            self._computation = _choose_computation(
                kernels, self._streams, slots, layout, shape, self._host_parts
            )

    @property
    def needs_no_counts(self) -> bool:
        """True if the host runs experts without knowing how many rows each has, as in graphs."""
        return isinstance(self._computation, TritonExperts)

    def copy(self, source: Tensor, slot: int, after: Event | None) -> Event:
        stream = self._streams.copies
        try:
            with self._streams.use(stream):
                if after is not None:
                    wait_on(stream, after)
                if self._pinned.holds(source):
                    self._slots[slot].copy_(source, non_blocking=True)
                else:
                    self._copy_in_pieces(source, self._slots[slot])
                return CudaEvent(stream.record_event())
        except RuntimeError as error:
            raise device_error("fetching an expert", error) from error

    def describe(self) -> str:
        """Return the GPU's name, noting other GPUs that are not used."""
        name, num_gpus = torch.cuda.get_device_name(self.torch_device), torch.cuda.device_count()
        return name if num_gpus == 1 else f"{name}, the first of {num_gpus} GPUs, used alone"

    def run(
        self, group: ExpertGroup, rows: ExpertRows, buffers: ExpertBuffers, after: Event | None
    ) -> Event:
        stream = self._streams.current
        try:
            if after is not None:
                wait_on(stream, after)
            return self._computation.run(group, rows, buffers, stream)
        except RuntimeError as error:
            raise device_error("computing experts", error) from error

    def to_host(self, x: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        host_x, host_experts = self._host_x[: len(x)], self._host_experts[: len(x)]
        try:
            host_experts.copy_(experts, non_blocking=True)
            host_x.copy_(x, non_blocking=True)
            event = CudaEvent(self._streams.current.record_event())
        except RuntimeError as error:
            raise device_error("copying a layer's inputs to the host", error) from error
        event.wait()
        return host_x, host_experts

    def host_parts(self, parts: Tensor) -> Tensor:
        return self._host_parts[: len(parts)]

    def stage(self, predicted: Tensor) -> Tensor:
        try:
            return self._host_predicted.copy_(predicted, non_blocking=True)
        except RuntimeError as error:
            raise device_error("copying a prediction to the host", error) from error

    def from_host(
        self, host_parts: Tensor, rows: ExpertRows, experts: IntArray, parts: Tensor
    ) -> None:
        try:
            self._computation.place(host_parts, experts, rows, parts)
        except RuntimeError as error:
            raise device_error("taking over the host's experts", error) from error

    def host_work(self, num_tokens: Sequence[int], work: Work) -> Work:
        return work

    def join(self) -> None:
        """Do nothing: experts run on the caller's own stream."""

    def drain(self) -> None:
        for stream in (self._streams.copies, self._streams.current):
            with suppress(RuntimeError):  # a GPU that failed has nothing under way
                CudaEvent(stream.record_event()).wait_until_ended()

    def close(self) -> None:
        """Free the memory; may be called again."""
        if not self._is_closed:
            self.drain()
            self._is_closed = True
            del self._slots, self._computation, self._host_parts, self._host_x
            self.__dict__.pop("_ring", None)
            self._streams.release()

    def _copy_in_pieces(self, source: Tensor, target: Tensor) -> None:
        for start in range(0, len(source), self._piece_bytes):
            stop = min(start + self._piece_bytes, len(source))
            piece = self._ring.take().tensor[: stop - start]
            piece.copy_(source[start:stop])
            target[start:stop].copy_(piece, non_blocking=True)
            self._ring.used(CudaEvent(self._streams.copies.record_event()))

    @cached_property
    def _ring(self) -> PinnedRing:
        return PinnedRing(self._streams, (_NUM_PIECES, self._piece_bytes), torch.uint8)


class TritonExperts:
    """Runs all experts of a group in one launch, without a loop on the host."""

    def __init__(
        self, streams: Streams, slots: Tensor, layout: SlotLayout, shape: MoEShape, num_pairs: int
    ) -> None:
        from lowtide.kernels import triton_experts

        self._kernels = triton_experts
        self._streams = streams
        self._num_pairs = num_pairs
        self._layout = layout
        self._slots = slots.view(layout.dtype) if layout.is_plain else slots
        self._images = [slot_image(each, layout) for each in layout.layers]
        self._tables = PinnedRing(streams, (_NUM_TABLES, shape.num_experts), torch.int32)
        listed = streams.pinned((align_up(num_pairs, triton_experts.PLACED_ROWS),), torch.int32)
        self._pairs = PinnedRow(listed, listed.numpy())  # that `place` names
        self._tiles = triton_experts.Tiles.empty(num_pairs, shape.num_experts, slots.device)
        # By layer: the group of all its experts that ran last, and its slots on the device.
        self._whole: list[ExpertGroup | None] = [None] * len(layout.layers)
        self._whole_slots = torch.empty(
            (len(layout.layers), shape.num_experts), dtype=torch.int32, device=slots.device
        )

    def try_out(self, host_parts: Tensor) -> None:
        """Launch every kernel over no pairs, which compiles it; raise its errors."""
        width, hidden = self._layout.largest.parts[0].shape
        counts = self._slots.new_zeros(self._tables.num_columns, dtype=torch.int64)
        parts, gate = (
            torch.empty((1, size), dtype=self._layout.dtype, device=self._slots.device)
            for size in (hidden, width)
        )
        for tile_rows, image in product(self._kernels.TILE_SIZES, set(self._images)):
            table = self._tables.take()
            table.array.fill(-1)
            self._kernels.plan_tiles(counts, table.tensor, tile_rows, self._tiles)
            self._tables.used(CudaEvent(self._streams.current.record_event()))
            self._kernels.gated_mlps(self._slots, image, self._tiles, 1, tile_rows, parts, gate)
        self._pairs.array.fill(-1)
        self._kernels.place_rows(host_parts, self._pairs.tensor[: self._kernels.PLACED_ROWS], parts)

    def run(
        self, group: ExpertGroup, rows: ExpertRows, buffers: ExpertBuffers, stream: Stream
    ) -> CudaEvent:
        """Queue a group's products on `stream`, the current one; return the event of their end."""
        num_pairs, table = len(rows.token_of), None
        if num_pairs > self._num_pairs:
            raise InternalError(
                f"A step of {num_pairs} pairs on a device planned for {self._num_pairs}."
            )
        tile_rows = self._kernels.tile_rows(num_pairs, self._tables.num_columns)
        if rows.is_known:
            num_tiles = int((-(-np.diff(rows.bounds)[group.experts] // tile_rows)).sum())
        else:
            num_tiles = self._kernels.max_tiles(num_pairs, len(group.experts), tile_rows)
        if num_tiles and group is self._whole[group.layer]:
            slots = self._whole_slots[group.layer]
            self._kernels.plan_tiles(rows.counts, slots, tile_rows, self._tiles)
        elif num_tiles:
            table = self._plan_anew(group, rows, tile_rows)
        if num_tiles:
            self._kernels.gated_mlps(
                self._slots,
                self._images[group.layer],
                self._tiles,
                num_tiles,
                tile_rows,
                buffers.parts,
                buffers.gate,
            )
        use = CudaEvent(stream.record_event())
        if table is not None:
            self._tables.used(use)
        return use

    def place(self, host_parts: Tensor, experts: IntArray, rows: ExpertRows, parts: Tensor) -> None:
        """Have the GPU read the host's pinned rows in place, so that they do not wait for fetches.

        It reads the list of rows in the same way. The calling thread waits for the GPU before it
        writes the next layer's or tile's rows, so the GPU has read them by then.
        """
        is_placed = np.zeros(len(rows.counts), np.bool_)
        is_placed[experts] = True
        pairs = np.repeat(is_placed, np.diff(rows.bounds)).nonzero()[0]
        if len(pairs):
            num_listed = len(pairs) + -len(pairs) % self._kernels.PLACED_ROWS
            self._pairs.array[: len(pairs)] = pairs
            self._pairs.array[len(pairs) : num_listed] = -1
            self._kernels.place_rows(host_parts, self._pairs.tensor[:num_listed], parts)

    def _plan_anew(self, group: ExpertGroup, rows: ExpertRows, tile_rows: int) -> PinnedRow:
        """Plan the tiles by slots that the device reads from the host, in the row returned."""
        if self._streams.is_capturing():  # it would read the row when it is another's
            raise RuntimeError("the GPU has not been told where this layer's experts are")
        table = self._tables.take()
        table.array.fill(-1)
        table.array[group.experts] = group.slots
        self._kernels.plan_tiles(rows.counts, table.tensor, tile_rows, self._tiles)
        if len(group.experts) == len(table.array):  # the same group comes again
            self._whole_slots[group.layer].copy_(table.tensor, non_blocking=True)
            self._whole[group.layer] = group
        return table


def slot_image(layout: ExpertLayout, slots: SlotLayout) -> SlotImage:
    """Return the places of a layer's expert parts in slots, for Triton's kernels."""
    from lowtide.kernels.triton_experts import SlotImage
    from lowtide.kernels.triton_weights import PLAIN

    unit = slots.dtype.itemsize if slots.is_plain else 1
    gate, up, down, *biases = (part.offsets[0] // unit for part in layout.parts)
    plain = plain_format(layout.dtype)
    forms = [PLAIN.value if each is plain else each.name for each in layout.formats]
    places = (biases[0], biases[1], biases[2]) if biases else None
    return SlotImage(slots.num_bytes // unit, gate, up, down, places, forms[0], forms[2])


def _has_kernel(layout: SlotLayout) -> bool:
    from lowtide.kernels.triton_weights import PACKED

    known = {plain_format(layout.dtype).name, *PACKED}
    formats_of = [each.formats for each in layout.layers]
    return all(gate is up and {gate.name, down.name} <= known for gate, up, down, *_ in formats_of)


class ReferenceExperts:
    """Runs one expert after another, in plain torch."""

    def __init__(self, slots: Tensor, layout: SlotLayout) -> None:
        self._slots = slots
        self._layout = layout

    def run(
        self, group: ExpertGroup, rows: ExpertRows, buffers: ExpertBuffers, stream: Stream
    ) -> CudaEvent:
        """Queue a group's products on `stream`, the current one; return the event of their end."""
        for expert, slot in zip(group.experts.tolist(), group.slots.tolist(), strict=True):
            pairs = rows.pairs(expert)
            if pairs.start < pairs.stop:
                parts, gate, up = (buffer[pairs] for buffer in buffers[:3])
                weights = self._layout.layers[group.layer].weights_in(self._slots[slot])
                REFERENCE.gated_mlp(parts, weights, gate, up, parts)
        return CudaEvent(stream.record_event())

    def place(self, host_parts: Tensor, experts: IntArray, rows: ExpertRows, parts: Tensor) -> None:
        for expert in experts.tolist():
            pairs = rows.pairs(expert)
            if pairs.start < pairs.stop:
                parts[pairs].copy_(host_parts[pairs], non_blocking=True)


def _choose_computation(
    kernels: str,
    streams: Streams,
    slots: Tensor,
    layout: SlotLayout,
    shape: MoEShape,
    host_parts: Tensor,
) -> TritonExperts | ReferenceExperts:
    """Choose Triton's kernels unless `reference` is requested; if unusable, warn why."""
    if kernels == "reference":
        return ReferenceExperts(slots, layout)
    why = why_no_triton(slots.device)
    if why is None and not _has_kernel(layout):
        why = f"there is none for {layout.describe()}"
    if why is None:
        computation = TritonExperts(streams, slots, layout, shape, len(host_parts))
        try:
            computation.try_out(host_parts)
            return computation
        except Exception as error:  # a GPU too small for them, a compiler, a folder, a driver
            why = f"{type(error).__name__}: {error}"
    warnings.warn(
        f"Experts on the GPU run one by one, without the Triton kernel: {why}.", stacklevel=3
    )
    return ReferenceExperts(slots, layout)
