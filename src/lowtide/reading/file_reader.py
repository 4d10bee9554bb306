"""Read byte ranges of checkpoint files into memory on reader threads.

Direct reads bypass the page cache: the enclosing aligned range is read into a small ring of
huge-page buffers, and the wanted bytes are copied (and converted) to their target. Where a file
system has no direct reads, buffered ones are used, with one warning, and their pages are dropped.
The threads make no torch calls and take no decisions.
"""

from __future__ import annotations

import contextlib
import os
import queue
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.core import align_up
from lowtide.errors import CheckpointError, StorageError, UnsupportedError
from lowtide.files.regular_file import OTHER_DRIVE, RegularFile, is_in_memory
from lowtide.formats import MatrixFormat
from lowtide.formats.arranged import Arranged
from lowtide.formats.convert import Importance, Pack, convert, convert_rows, pack
from lowtide.kernels.cpu.reader import OpenFile
from lowtide.memory.arena import Arena
from lowtide.threads.daemon_pool import DaemonPool
from lowtide.threads.event import WAIT_LIMIT_S

NUM_READERS = 4
"""Number of concurrent reads, each with one buffer of the ring."""

SECTOR_BYTES = 4096
"""Alignment of direct reads in files and memory; no block device needs more."""

CLOSE_LIMIT_S = 1.0
"""Longest wait for reads under way when a reader is closed."""

MAX_READ_BYTES = 16 << 20
"""Longest range read at once, so that the ring stays small for the largest experts."""


class Piece(NamedTuple):
    """Part of a read: bytes `offset` to `offset + num_bytes` of it go to `target`."""

    offset: int
    num_bytes: int
    format: MatrixFormat  # of the bytes in the file, which has one tensor
    target: NDArray[np.uint8]
    target_format: MatrixFormat
    importance: Importance | None = None  # of inputs, where weights are rounded on the way


class Read(NamedTuple):
    """One contiguous byte range of one file, and the targets of its pieces."""

    file: int
    start: int
    num_bytes: int
    pieces: tuple[Piece, ...]


class ArrayRead(NamedTuple):
    """Byte ranges, one per tensor of a format, for an array of any strides.

    target [rows, ...]: weights of the plain `target_format` as unsigned integers, or bytes of the
    blocks in which the format is kept; its C order is that of the file. Without a `target_format`
    bytes are copied unchanged.
    """

    places: tuple[tuple[int, int], ...]  # file and start
    format: MatrixFormat
    target: NDArray[Any]
    target_format: MatrixFormat | None
    name: str = ""  # for error messages

    def stored_bytes(self, num_elements: int) -> list[int]:
        """Return the bytes in the file, for each place, of `num_elements` target elements."""
        if self.target_format is None:
            return [num_elements * self.target.itemsize]
        num_weights = self.target_format.num_weights(num_elements)
        return [self.format.num_bytes(num_weights, i) for i in range(len(self.places))]


class Window(NamedTuple):
    """A byte range of a file, read once for several matrices."""

    file: int
    start: int
    num_bytes: int


class MatrixRead(NamedTuple):
    """Read of a matrix in several tensors into its kept format, or unpacked."""

    name: str  # for error messages
    places: tuple[tuple[int, int], ...]  # file and start of each tensor
    format: Arranged
    shape: tuple[int, ...]
    target: NDArray[np.uint8]  # 1-D
    target_format: MatrixFormat
    window: Window | None = None  # that has all of it


AnyRead = Read | ArrayRead | MatrixRead

Ticket = Future[int]
"""Result of submitted reads: bytes read, or the StorageError that ended them."""


def read_stalled(what: str) -> StorageError:
    """Make the error for a read that exceeded `WAIT_LIMIT_S`."""
    return StorageError(
        f"A read of {what} has not ended within {WAIT_LIMIT_S:g} s; the disk or network drive that "
        f"holds the checkpoint does not answer. {OTHER_DRIVE}"
    )


def ring_bytes(largest_read_bytes: int) -> int:
    """Return the bytes of a ring for reads of at most `largest_read_bytes`."""
    return NUM_READERS * _buffer_bytes(largest_read_bytes)


def matrix_bytes_at_once(stored: Arranged, shape: tuple[int, ...]) -> int:
    """Return the buffer bytes needed to read a matrix unit by unit."""
    tensors = stored.tensors(shape)
    pieces = [each.num_bytes if each.is_whole else each.unit_bytes for each in tensors]
    return sum(pieces) + 2 * SECTOR_BYTES * len(pieces)


class FileReader:
    """Owns the reader threads, the ring and the open files.

    `is_direct` is True if the page cache is bypassed.
    """

    def __init__(
        self,
        files: Sequence[RegularFile],
        largest_read_bytes: int,
        pack: Pack = pack,
        num_readers: int = NUM_READERS,
    ) -> None:
        """Open `files`; a Read's `file` is an index into them.

        pack: for weights converted to a packed format. Raises StorageError if a file cannot be
        opened or has changed.
        """
        self.files = tuple(files)
        self._pack = pack
        self._num_readers = num_readers
        self._payload_bytes = _buffer_bytes(largest_read_bytes) - 2 * SECTOR_BYTES
        self._buffers: queue.SimpleQueue[NDArray[np.uint8]] = queue.SimpleQueue()
        self._fill_ring()
        self._descriptors, self.is_direct = self._open()
        self._is_lent = False
        self._threads = DaemonPool(num_readers, "lowtide-read")

    def submit(self, reads: Sequence[AnyRead]) -> Ticket:
        """Start reads, in order, on one thread; targets must stay alive until they end."""
        if self._is_lent:
            self._is_lent = False
            self._fill_ring()
        return self.await_work(partial(self._run, reads))

    def await_work(self, work: Callable[[], int]) -> Ticket:
        """Run `work` on a reader thread, to wait for another reader's reads."""
        return self._threads.submit(work)

    def lend(self) -> tuple[list[OpenFile], NDArray[np.uint8] | None]:
        """Lend the open files, and the ring for direct reads, to a reader that replaces this one.

        A read submitted to this one later (for a measurement) allocates a new ring.
        """
        for _ in range(self._num_readers):
            self._buffers.get()
        self._is_lent = True
        files = [OpenFile(*each) for each in zip(self.files, self._descriptors, strict=True)]
        return files, self._ring.array() if self.is_direct else None

    def drain(self) -> None:
        """Wait for all submitted reads. Raises StorageError after `WAIT_LIMIT_S`."""
        if not self._threads.drain(WAIT_LIMIT_S):
            raise read_stalled("weights")

    def close(self) -> None:
        """Drop pending reads, wait for running ones and close the files.

        The files and memory of a read that exceeds `CLOSE_LIMIT_S` stay open.
        """
        descriptors = [] if not self._threads.close(CLOSE_LIMIT_S) else self._descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        self._descriptors = []

    def _fill_ring(self) -> None:
        size = self._payload_bytes + 2 * SECTOR_BYTES
        self._ring = Arena(self._num_readers * size)
        ring = self._ring.array()
        for i in range(self._num_readers):
            self._buffers.put(ring[i * size : (i + 1) * size])

    def _open(self) -> tuple[list[int], bool]:
        if flags := getattr(os, "O_DIRECT", 0):
            with contextlib.suppress(StorageError):
                descriptors = self._open_all(flags)
                if self._can_read_direct(descriptors):
                    return descriptors, True
                for descriptor in descriptors:
                    os.close(descriptor)
        descriptors = self._open_all(0)
        if not all(map(is_in_memory, descriptors)):
            warnings.warn(
                f"{self.files[0].path.parent} has no direct reads; reading through the page "
                "cache, which is slower when memory is short.",
                stacklevel=3,
            )
        return descriptors, False

    def _open_all(self, flags: int) -> list[int]:
        with contextlib.ExitStack() as undo:
            descriptors = []
            for file in self.files:
                descriptors.append(file.open(flags))
                undo.callback(os.close, descriptors[-1])
            undo.pop_all()
        return descriptors

    def _can_read_direct(self, descriptors: Sequence[int]) -> bool:
        buffer = self._buffers.get()
        try:
            if all(map(is_in_memory, descriptors)):
                return False  # each would be a second copy
            for descriptor in descriptors:
                os.preadv(descriptor, [buffer[:SECTOR_BYTES].data], 0)
        except OSError:
            return False
        finally:
            self._buffers.put(buffer)
        return True

    def _run(self, reads: Sequence[AnyRead]) -> int:
        buffer = self._buffers.get()
        num_bytes, pulled = 0, None
        try:
            for read in reads:
                if not isinstance(read, MatrixRead):
                    num_bytes, pulled = num_bytes + self._read(read, buffer), None
                    continue
                if read.window is None or read.window.num_bytes > self._payload_bytes:
                    pulled = None
                elif pulled is None or pulled[0] != read.window:
                    pulled = read.window, self._pull(*read.window, buffer)
                num_bytes += self._read_matrix(read, buffer, pulled)
            return num_bytes
        finally:
            self._buffers.put(buffer)

    def _read_matrix(
        self,
        read: MatrixRead,
        buffer: NDArray[np.uint8],
        pulled: tuple[Window, NDArray[np.uint8]] | None,
    ) -> int:
        """Read a matrix from a pulled window, or as many units at a time as the buffer holds."""
        kept, content = read.format.kept, read.target
        if read.target_format is not kept:
            content = np.empty(kept.matrix_bytes(read.shape), np.uint8)
        sections = kept.views(content, read.shape)
        spare_bytes = 2 * SECTOR_BYTES * len(read.places)  # each range is pulled by itself
        most_bytes = len(content) * 2 if pulled else self._payload_bytes - spare_bytes
        for units, slices in read.format.ranges(read.shape, most_bytes):
            stored, rest = [], buffer
            for (file, start), part in zip(read.places, slices, strict=True):
                num_bytes = part.stop - part.start
                if pulled is not None:
                    first = start + part.start - pulled[0].start
                    stored.append(pulled[1][first : first + num_bytes])
                    continue
                stored.append(self._pull(file, start + part.start, num_bytes, rest))
                rest = rest[align_up(num_bytes + SECTOR_BYTES, SECTOR_BYTES) :]
            try:
                read.format.arrange_units(stored, read.shape, units, sections)
            except UnsupportedError as reason:
                raise UnsupportedError(f"{read.name}: {reason}.") from None
        if read.target_format is not kept:
            kept.unpack_matrix(content, read.shape, read.target, read.target_format)
        return sum(each.num_bytes for each in read.format.tensors(read.shape))

    def _read(self, read: Read | ArrayRead, buffer: NDArray[np.uint8]) -> int:
        """Read all pieces at once or, if the buffer is too small, one by one."""
        if isinstance(read, ArrayRead):
            return self._read_array(read, buffer)
        if read.num_bytes <= self._payload_bytes:
            payload = self._pull(read.file, read.start, read.num_bytes, buffer)
            for piece in read.pieces:
                self._store(piece, 0, payload[piece.offset : piece.offset + piece.num_bytes])
            return read.num_bytes
        return sum(self._read_piece(read, piece, buffer) for piece in read.pieces)

    def _read_piece(self, read: Read, piece: Piece, buffer: NDArray[np.uint8]) -> int:
        # Whole blocks of both formats.
        unit_bytes = max(
            piece.format.block_bytes[0], piece.format.num_bytes(piece.target_format.block_size)
        )
        step = self._payload_bytes - self._payload_bytes % unit_bytes
        for done in range(0, piece.num_bytes, step):
            num_bytes = min(step, piece.num_bytes - done)
            start = read.start + piece.offset + done
            self._store(piece, done, self._pull(read.file, start, num_bytes, buffer))
        return piece.num_bytes

    def _store(self, piece: Piece, done: int, stored: NDArray[np.uint8]) -> None:
        """Copy `stored`, the bytes of `piece` from `done` on, to their target."""
        block_bytes, block_size = piece.format.block_bytes[0], piece.format.block_size
        start, stop = (
            piece.target_format.num_bytes(num_bytes // block_bytes * block_size)
            for num_bytes in (done, done + len(stored))
        )
        convert(
            [stored],
            piece.format,
            piece.target[start:stop],
            piece.target_format,
            self._pack,
            piece.importance,
        )

    def _read_array(self, read: ArrayRead, buffer: NDArray[np.uint8]) -> int:
        """Read as many rows at a time as the buffer holds of all places."""
        row_size = read.target[0].size
        row_bytes = sum(read.stored_bytes(row_size))
        spare_bytes = 2 * SECTOR_BYTES * (len(read.places) - 1)  # each range is pulled by itself
        num_rows = max(1, (self._payload_bytes - spare_bytes) // row_bytes)
        for first in range(0, len(read.target), num_rows):
            rows = read.target[first : first + num_rows]
            stored, rest = [], buffer
            ranges = zip(
                read.places,
                read.stored_bytes(first * row_size),
                read.stored_bytes(rows.size),
                strict=True,
            )
            for (file, start), skipped, num_bytes in ranges:
                stored.append(self._pull(file, start + skipped, num_bytes, rest))
                rest = rest[align_up(num_bytes + SECTOR_BYTES, SECTOR_BYTES) :]
            if read.target_format is None:
                rows[...] = stored[0].view(rows.dtype).reshape(rows.shape)
                continue
            try:
                convert_rows(stored, read.format, rows, read.target_format)
            except CheckpointError as reason:
                raise CheckpointError(f"{read.name}: {reason}; fetch it again.") from None
        return row_bytes * len(read.target)

    def _pull(
        self, file: int, start: int, num_bytes: int, buffer: NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        """Read bytes `start` to `start + num_bytes` of a file; return a view of `buffer`."""
        aligned_start = start - start % SECTOR_BYTES
        skip = start - aligned_start
        wanted = skip + num_bytes
        filled = 0
        while filled < wanted:
            target = buffer[filled : align_up(wanted, SECTOR_BYTES)].data
            try:
                got = os.preadv(self._descriptors[file], [target], aligned_start + filled)
            except OSError as error:
                raise StorageError(
                    f"Reading {num_bytes} bytes at {start} of {self.files[file].path} failed: "
                    f"{error}. {OTHER_DRIVE}"
                ) from error
            filled += got
            if filled < wanted and (got == 0 or got % SECTOR_BYTES):
                self.files[file].check(self._descriptors[file])
                raise StorageError(
                    f"{self.files[file].path} ends at byte {self.files[file].num_bytes}, before "
                    f"the end of bytes {start} to {start + num_bytes} that hold weights. Fetch it "
                    "again."
                )
        self.files[file].check(self._descriptors[file])
        if not self.is_direct:
            with contextlib.suppress(OSError, AttributeError):
                advice = os.POSIX_FADV_DONTNEED
                os.posix_fadvise(self._descriptors[file], aligned_start, filled, advice)
        return buffer[skip:wanted]


def _buffer_bytes(largest_read_bytes: int) -> int:
    payload = align_up(min(largest_read_bytes, MAX_READ_BYTES), SECTOR_BYTES)
    return payload + 2 * SECTOR_BYTES
