"""A compiled read that never ends: what `test_compiled_reader.py` runs with the driver's `pread`.

    python endless_read.py FIFO FILE

The system refuses to read a pipe as a file; by that `pread` it is a drive that does not answer.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
from test_compiled_reader import EXPERTS, SLOT_BYTES, wanted

from lowtide.errors import StorageError
from lowtide.files.regular_file import RegularFile
from lowtide.kernels.cpu.library import load_kernels
from lowtide.kernels.cpu.reader import CompiledReader, OpenFile, Range, SlotSegment


def read_and_close(fifo: Path, path: Path) -> int:
    """The pipe's descriptor, from which nobody who is left reads but the reader's threads."""
    os.mkfifo(fifo)
    regular, pipe = RegularFile.at(path), os.open(fifo, os.O_RDWR)
    status = os.fstat(pipe)
    stands_in = RegularFile(fifo, 0, (0, 0, status.st_mtime_ns, status.st_ctime_ns))
    files = [OpenFile(regular, regular.open()), OpenFile(stands_in, pipe)]
    experts = [EXPERTS[0], [Range(1, [SlotSegment(0, 1000, 0)])]]
    slots = np.zeros((2, SLOT_BYTES), np.uint8)
    memory, library = slots.reshape(-1), load_kernels()
    reader = CompiledReader(library, experts, files, memory, SLOT_BYTES, None)

    def error(slot: int, limit_s: float) -> str:
        try:
            reader.read(1, slot, limit_s)
        except StorageError as error:
            return str(error)
        raise AssertionError("bytes out of a pipe that has none")

    start_s = time.monotonic()
    text = error(0, 0.2)
    assert f"1000 bytes of expert weights of {fifo} has not ended within 0.2 s" in text, text
    assert time.monotonic() - start_s >= 0.2
    assert reader.is_filling(0)
    reader.read(0, 1, 60.0)  # by another thread
    assert np.array_equal(slots[1], wanted(0))
    assert not reader.drain(0.1)

    # Whoever waits for a read as its reader closes hears of it.
    heard: list[str] = []
    waiter = threading.Thread(target=lambda: heard.append(error(1, 600.0)))
    waiter.start()
    while not reader.is_filling(1):
        time.sleep(0.01)
    assert not reader.close(0.2)
    waiter.join(60.0)
    assert len(heard) == 1 and "was given up" in heard[0], heard
    return pipe


if __name__ == "__main__":
    pipe = read_and_close(Path(sys.argv[1]), Path(sys.argv[2]))
    os.write(pipe, bytes(2000))  # into slots that only the reader's threads have yet
    time.sleep(0.1)
    print("ended")
