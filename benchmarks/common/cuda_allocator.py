"""Rules of torch's CUDA caching allocator: its reserved bytes for a trace of allocations.

A request is rounded up to 512 bytes. Up to 1 MiB it comes from the pool of small blocks, whose
segments are 2 MiB; more from that of large ones, whose segments are 20 MiB up to 10 MiB, and above
that the request rounded up to 2 MiB. The smallest free block that is large enough is taken, at the
lowest address among equals. Its rest is split off where it is worth it: of small blocks at least
512 bytes, of large ones more than 1 MiB. A block that is freed joins its free neighbours in the
segment, and the segment stays reserved. Only where the device has no more are segments that are
wholly free given back, and the request tried once more. (c10/cuda/CUDACachingAllocator.cpp with
its default settings, one stream.)
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lowtide.core import align_up
from lowtide.errors import InternalError

_MIB = 1 << 20
BLOCK_BYTES = 512
SMALL_BYTES = _MIB
SMALL_SEGMENT_BYTES = 2 * _MIB
LARGE_SEGMENT_BYTES = 20 * _MIB
LEAST_OWN_SEGMENT_BYTES = 10 * _MIB
SEGMENT_GRANULE_BYTES = 2 * _MIB


class Change(NamedTuple):
    """Bytes that are allocated, or with a minus freed; key: which."""

    key: Hashable
    num_bytes: int


class OutOfMemory(Exception):
    """The device has no room for a request, whatever is given back."""


class Peaks(NamedTuple):
    """Most memory of a replay."""

    live_bytes: int  # as requested: what no allocator can be below
    allocated_bytes: int  # rounded
    reserved_bytes: int

    @property
    def inflation(self) -> float:
        """Reserved beyond the theoretical peak, as a share of that (the paper's Figures 4, 13)."""
        return self.reserved_bytes / self.live_bytes - 1


@dataclass(eq=False, slots=True)
class _Block:
    """Part of a segment, between its neighbours."""

    address: int
    num_bytes: int
    is_small: bool
    is_free: bool = False
    before: _Block | None = None
    after: _Block | None = None


class CachingAllocator:
    """One device. Addresses only grow: what is given back is not used again."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        """capacity_bytes: what may be reserved at most; None: as much as there is asked for."""
        self._capacity_bytes = capacity_bytes
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (bytes, address)
        self._blocks: dict[int, _Block] = {}  # free ones, by address
        self._end = 0
        self.allocated_bytes = self.reserved_bytes = 0
        self.num_segments = 0

    def allocate(self, num_bytes: int) -> _Block:
        """Raises OutOfMemory."""
        size = align_up(max(num_bytes, 1), BLOCK_BYTES)
        is_small = size <= SMALL_BYTES
        block = self._best_fit(size, is_small) or self._new_segment(size, is_small)
        rest_bytes = block.num_bytes - size
        if rest_bytes >= BLOCK_BYTES if is_small else rest_bytes > SMALL_BYTES:
            self._split(block, size)
        self.allocated_bytes += block.num_bytes
        return block

    def free(self, block: _Block) -> None:
        self.allocated_bytes -= block.num_bytes
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                self._take_out(neighbour)
                block = _joined(block, neighbour)
        self._put_in(block)

    def give_back(self) -> None:
        """Segments that are wholly free, as `torch.cuda.empty_cache` does."""
        for block in list(self._blocks.values()):
            if block.before is None and block.after is None:
                self._take_out(block)
                self.reserved_bytes -= block.num_bytes
                self.num_segments -= 1

    def _best_fit(self, size: int, is_small: bool) -> _Block | None:
        pool = self._free[is_small]
        index = bisect.bisect_left(pool, (size, 0))
        if index == len(pool):
            return None
        block = self._blocks[pool[index][1]]
        self._take_out(block)
        return block

    def _new_segment(self, size: int, is_small: bool) -> _Block:
        num_bytes = segment_bytes(size)
        if not self._has_room(num_bytes):
            self.give_back()
        if not self._has_room(num_bytes):
            raise OutOfMemory(
                f"{num_bytes} bytes more than {self.reserved_bytes} are over "
                f"{self._capacity_bytes}."
            )
        block = _Block(self._end, num_bytes, is_small)
        self._end += align_up(num_bytes, SEGMENT_GRANULE_BYTES)
        self.reserved_bytes += num_bytes
        self.num_segments += 1
        return block

    def _has_room(self, num_bytes: int) -> bool:
        capacity = self._capacity_bytes
        return capacity is None or self.reserved_bytes + num_bytes <= capacity

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(
            block.address + size, block.num_bytes - size, block.is_small, False, block, block.after
        )
        if block.after is not None:
            block.after.before = rest
        block.num_bytes, block.after = size, rest
        self._put_in(rest)

    def _put_in(self, block: _Block) -> None:
        block.is_free = True
        self._blocks[block.address] = block
        bisect.insort(self._free[block.is_small], (block.num_bytes, block.address))

    def _take_out(self, block: _Block) -> None:
        block.is_free = False
        del self._blocks[block.address]
        pool = self._free[block.is_small]
        del pool[bisect.bisect_left(pool, (block.num_bytes, block.address))]


def segment_bytes(size: int) -> int:
    """Return the bytes asked of the device for a rounded request that no free block can take."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < LEAST_OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return align_up(size, SEGMENT_GRANULE_BYTES)


def replay(changes: Iterable[Change], capacity_bytes: int | None = None) -> Peaks:
    """Replay a trace through the allocator; return its peaks.

    A free of memory that was there before the trace is left out. Raises OutOfMemory where the
    device has too little.
    """
    allocator = CachingAllocator(capacity_bytes)
    held: dict[Hashable, tuple[_Block, int]] = {}
    live_bytes = 0
    peaks = Peaks(0, 0, 0)
    for key, num_bytes in changes:
        if num_bytes > 0:
            if key in held:
                raise InternalError(f"A trace allocates {key} twice.")
            held[key] = (allocator.allocate(num_bytes), num_bytes)
            live_bytes += num_bytes
        elif key in held:
            block, num_held = held.pop(key)
            allocator.free(block)
            live_bytes -= num_held
        now = Peaks(live_bytes, allocator.allocated_bytes, allocator.reserved_bytes)
        peaks = Peaks(*map(max, peaks, now))
    return peaks


def _joined(block: _Block, neighbour: _Block) -> _Block:
    """Merge two adjacent blocks into the first one."""
    first, second = (block, neighbour) if neighbour is block.after else (neighbour, block)
    first.num_bytes += second.num_bytes
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first
