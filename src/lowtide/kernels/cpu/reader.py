"""Compiled reader: threads that read whole experts into slots."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.core import IntArray
from lowtide.errors import StorageError
from lowtide.files.regular_file import OTHER_DRIVE, RegularFile
from lowtide.kernels.cpu.library import functions_of, struct
from lowtide.threads.event import INTERRUPT_POLL_S

PIECE_BYTES = 1 << 20
"""Bytes of a file that one thread reads at once; several threads share one expert."""

SECTOR_BYTES = 4096

_PENDING, _READY, _CANCELLED = -1, 0, -4  # of reader.hpp, beside errors

_INT, _LONG, _DOUBLE, _P = ctypes.c_int, ctypes.c_long, ctypes.c_double, ctypes.c_void_p
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "open_readiness": (_P, _LONG),
    "close_readiness": (None, _P),
    "end_piece": (None, _P, _LONG, ctypes.c_uint32, _INT),
    "begin_slot": (ctypes.c_uint32, _P, _LONG, ctypes.c_uint32),
    "wait_for_slot": (_INT, _P, _LONG, _DOUBLE),
    "open_reader": (_P, _P, _P),
    "start_read": (None, _P, _LONG, _LONG),
    "cancel_read": (_LONG, _P, _LONG),
    "drain_reader": (_INT, _P, _DOUBLE),
    "close_reader": (_INT, _P, _DOUBLE),
    "free_reader": (None, _P),
}

_never_freed: list[object] = []
"""Objects of reads that did not end, kept alive."""


class Readiness:
    """Readiness of each slot: whether all of its bytes have been read. Thread-safe."""

    def __init__(self, library: ctypes.CDLL, num_slots: int) -> None:
        self._functions = functions_of(library, _FUNCTIONS)
        self.address: int = self._functions["open_readiness"](num_slots)
        close = self._functions["close_readiness"]
        weakref.finalize(self, close, self.address).atexit = False

    def begin(self, slot: int) -> int:
        """Mark a slot as being filled; returns the number of the filling, for `end`."""
        filling: int = self._functions["begin_slot"](self.address, slot, 1)
        return filling

    def end(self, slot: int, filling: int, has_failed: bool = False) -> None:
        """Mark a filling as ended; ignored unless it is the slot's latest."""
        error = _CANCELLED if has_failed else _READY
        self._functions["end_piece"](self.address, slot, filling, error)

    def wait(self, slot: int, limit_s: float) -> int | None:
        """Wait for a slot's filling and return its state, 0 on success; None after `limit_s`."""
        state: int = self._functions["wait_for_slot"](self.address, slot, limit_s)
        return None if state == _PENDING else state


class SlotSegment(NamedTuple):
    """Bytes of a file that belong in a slot, `target` bytes from its start."""

    start: int
    num_bytes: int
    target: int


class Range(NamedTuple):
    """Segments of one file that are read together, in order, with small gaps."""

    file: int
    segments: Sequence[SlotSegment]


class OpenFile(NamedTuple):
    """File that experts are read from."""

    file: RegularFile
    descriptor: int


class CompiledReader:
    """Reader of experts, numbered through all layers, into slots.

    Refuses to read a file that was modified since it was opened.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        experts: Sequence[Sequence[Range]],
        files: Sequence[OpenFile],
        slots: NDArray[np.uint8],
        slot_bytes: int,
        buffers: NDArray[np.uint8] | None,
        num_at_once: int | None = None,
    ) -> None:
        """Start the threads.

        slots: the memory of all slots. buffers: bounce buffers of direct reads; None: reads are not
          direct.
        num_at_once: direct reads in flight, by default `NUM_DIRECT`. Raises StorageError if the
          system cannot start a thread.
        """
        self._functions = functions_of(library, _FUNCTIONS)
        self._is_closing = False
        self.is_direct = buffers is not None
        self._files = files
        self._experts = experts
        self._keep: list[object] = [slots, buffers]
        self.readiness = Readiness(library, len(slots) // slot_bytes)
        arrays = (*_tables(experts), _facts(files), slots)
        self._keep += arrays
        source = struct("Source")(
            *(each.ctypes.data for each in arrays),
            None if buffers is None else buffers.ctypes.data,
            slot_bytes,
            *_division(buffers, num_at_once or NUM_DIRECT),
        )
        opened = self._functions["open_reader"](ctypes.byref(source), self.readiness.address)
        if not opened:
            raise StorageError(
                "The system has no thread to give that reads experts. Raise the limit (ulimit -u, "
                "or the container's)."
            )
        self.address: int = opened
        # A caller that waits for a read as this is closed yet has it.
        weakref.finalize(self, self._functions["free_reader"], opened).atexit = False

    def read(self, expert: int, slot: int, limit_s: float) -> int:
        """Fill a slot and return the number of bytes read.

        Raises StorageError if they cannot be read, or not within `limit_s`; the slot may then be
        written to until `is_filling` is False.
        """
        self._functions["start_read"](self.address, expert, slot)
        state, end_s = None, monotonic() + limit_s
        while state is None and not self._is_closing and monotonic() < end_s:
            state = self.readiness.wait(slot, min(limit_s, INTERRUPT_POLL_S))
        if state != _READY:
            self._functions["cancel_read"](self.address, slot)
            raise self.error(expert, _CANCELLED if self._is_closing else state, limit_s)
        return self.num_bytes(expert)

    def when_over(self, slot: int) -> Future[int]:
        """Return a future that completes once no read into the slot is in flight.

        It never completes if the reader is closed first.
        """
        over: Future[int] = Future()

        def watch() -> None:
            while not self._is_closing:
                if self.readiness.wait(slot, INTERRUPT_POLL_S) is not None:
                    over.set_result(0)
                    return

        threading.Thread(target=watch, daemon=True).start()
        return over

    def num_bytes(self, expert: int) -> int:
        return sum(_end(each) - each.segments[0].start for each in self._experts[expert])

    def is_filling(self, slot: int) -> bool:
        """Return True while a read into the slot is in flight."""
        return self.readiness.wait(slot, 0.0) is None

    def error(self, expert: int, state: int | None, limit_s: float = 0.0) -> StorageError:
        """Return the error of a read that ended with `state`; None: not within `limit_s`."""
        files = [self._files[number] for number in {one.file for one in self._experts[expert]}]
        names = ", ".join(str(each.file.path) for each in files)
        what = f"{self.num_bytes(expert)} bytes of expert weights of {names}"
        if state is None:
            return StorageError(
                f"A read of {what} has not ended within {limit_s:g} s; the disk or network drive "
                f"that holds the checkpoint does not answer. {OTHER_DRIVE}"
            )
        if state > 0:
            return StorageError(f"Reading {what} failed: {os.strerror(state)}. {OTHER_DRIVE}")
        try:
            for file, descriptor in files:
                file.check(descriptor)
        except StorageError as error:
            return error
        return StorageError(f"The read of {what} was given up.")

    def drain(self, limit_s: float) -> bool:
        """Cancel reads that have not begun and wait for the others; True if all have ended."""
        return bool(self._functions["drain_reader"](self.address, limit_s))

    def close(self, limit_s: float) -> bool:
        """Stop the threads; False if a read has not ended.

        The memory and files that such a read uses must then be kept; this reader keeps its own.
        """
        self._is_closing = True
        has_ended = bool(self._functions["close_reader"](self.address, limit_s))
        if not has_ended:
            _never_freed.append(self._keep)
        return has_ended


def _division(buffers: NDArray[np.uint8] | None, num_direct: int) -> tuple[int, int]:
    """Return the bytes of a piece and the number of threads, each with a buffer.

    Without buffers a read is a copy, for which a busy machine can spare a few threads.
    """
    if buffers is None:
        return PIECE_BYTES, NUM_BUFFERED
    num_threads = min(num_direct, len(buffers) // (3 * SECTOR_BYTES))
    most_bytes = len(buffers) // num_threads - 2 * SECTOR_BYTES
    return min(PIECE_BYTES, most_bytes // SECTOR_BYTES * SECTOR_BYTES), num_threads


NUM_DIRECT, NUM_BUFFERED = 4, 2
"""Direct reads in flight on a disk that was not measured, and copies out of the page cache."""


def _facts(files: Sequence[OpenFile]) -> IntArray:
    """Return `files` of reader.hpp."""
    facts = [(descriptor, each.num_bytes, *each.identity[2:]) for each, descriptor in files]
    return np.array(facts, np.int64)


def _tables(experts: Sequence[Sequence[Range]]) -> tuple[IntArray, IntArray, IntArray]:
    """Return `first_range`, `ranges` and `segments` of reader.hpp."""
    first, ranges = [0], []
    segments: list[SlotSegment] = []
    for of_expert in experts:
        for file, own in of_expert:
            start = own[0].start
            ranges.append((file, start, _end(Range(file, own)) - start, len(segments), len(own)))
            segments += own
        first.append(len(ranges))
    found = (first, ranges, segments)
    tables = [np.array(each, np.int64) for each in found]
    return tables[0], tables[1], tables[2]


def _end(one: Range) -> int:
    return one.segments[-1].start + one.segments[-1].num_bytes
