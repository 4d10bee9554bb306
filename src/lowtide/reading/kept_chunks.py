"""Read chunks of kept sequences' files directly; each thread checks the chunks it reads."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import suppress
from functools import partial
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from lowtide.errors import StorageError
from lowtide.files.array_file import Contradiction
from lowtide.files.kept_file import BORDER_BYTES, Chunk, FileHead, KeyLayout, check
from lowtide.memory.arena import Arena
from lowtide.reading.file_reader import CLOSE_LIMIT_S, NUM_READERS, Ticket
from lowtide.threads.daemon_pool import DaemonPool
from lowtide.threads.event import INTERRUPT_POLL_S, WAIT_LIMIT_S

Place = Callable[[Chunk, NDArray[np.uint8]], None]
"""Callback with a chunk and its content, which stays the reader's.

It is called on several threads at once, with different chunks.
"""


class ChunkReader:
    """Owner of reader threads, started with the first file; reads one file at a time."""

    def __init__(self, layout: KeyLayout, key: bytes) -> None:
        self._layout, self._key = layout, key
        self._threads = DaemonPool(NUM_READERS, "lowtide-kept")
        self._is_stopped = False

    def read(self, descriptor: int, head: FileHead, chunks: Sequence[Chunk], place: Place) -> None:
        """Read some chunks of a file, then close it.

        `place` is called on the reader threads with authenticated content. Raises Contradiction for
        other content, OSError, and StorageError for a drive that does not answer; `place` is not
        called afterwards.
        """
        work = _Reading(descriptor, head, self._key, chunks, place)
        size = self._layout.most_stored_bytes
        tickets: list[Ticket] = []
        try:
            buffers = Arena(NUM_READERS * size).array().reshape(NUM_READERS, size)
            _go_direct(descriptor, buffers[0])
            for gate, buffer in zip(work.gates, buffers, strict=False):
                tickets.append(self._threads.submit(partial(work.run, buffer, gate)))
            self._wait(tickets)
        finally:
            work.end()
            if not wait(tickets, CLOSE_LIMIT_S).not_done:  # otherwise a read still uses it
                os.close(descriptor)

    def stop_waiting(self) -> None:
        """Make the current read fail soon. Thread-safe."""
        self._is_stopped = True

    def close(self) -> bool:
        """End the threads; return False if a read has not ended."""
        return self._threads.close(CLOSE_LIMIT_S)

    def _wait(self, tickets: list[Ticket]) -> None:
        end_s = monotonic() + WAIT_LIMIT_S
        while (done := wait(tickets, INTERRUPT_POLL_S, FIRST_EXCEPTION)).not_done:
            if any(ticket.exception() for ticket in done.done):
                break
            if self._is_stopped or monotonic() > end_s:
                raise StorageError("the drive has not answered")
        for ticket in done.done:
            ticket.result()


class _Reading:
    """Reading of one file, whose chunks several threads take in turn."""

    def __init__(
        self,
        descriptor: int,
        head: FileHead,
        key: bytes,
        chunks: Sequence[Chunk],
        place: Place,
    ) -> None:
        self._descriptor, self._head, self._key = descriptor, head, key
        self._place = place
        self._next = iter(chunks)
        self._gate = threading.Lock()
        # A thread's is held while it places a chunk.
        self.gates = [threading.Lock() for _ in chunks[:NUM_READERS]]
        self._is_over = False

    def run(self, buffer: NDArray[np.uint8], gate: threading.Lock) -> int:
        """Read chunks on one thread; return the bytes read."""
        num_bytes = 0
        while not self._is_over and (chunk := self._take()) is not None:
            stored = buffer[: chunk.stored_bytes]
            self._pull(chunk, stored)
            check(stored, chunk, self._head, self._key)
            with gate:
                if not self._is_over:
                    self._place(chunk, stored[: chunk.num_bytes])
            num_bytes += len(stored)
        return num_bytes

    def end(self) -> None:
        """Wait for running `place` calls and prevent further ones."""
        self._is_over = True
        for gate in self.gates:
            with gate:  # wait until its thread has placed its chunk
                pass

    def _take(self) -> Chunk | None:
        with self._gate:
            return next(self._next, None)

    def _pull(self, chunk: Chunk, stored: NDArray[np.uint8]) -> None:
        filled = 0
        while filled < len(stored):
            got = os.preadv(self._descriptor, [stored[filled:].data], chunk.start + filled)
            if not got:
                raise Contradiction(f"it ends in its chunk {chunk.number}")
            filled += got


def _go_direct(descriptor: int, buffer: NDArray[np.uint8]) -> None:
    """Switch to direct reads if the file system supports them."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    with suppress(OSError, AttributeError):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        try:
            os.preadv(descriptor, [buffer[:BORDER_BYTES].data], 0)
        except OSError:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
