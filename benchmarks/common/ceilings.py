"""Ceilings of the machine, measured beside everything that is compared with them."""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from common.memory import drop_pages
from lowtide.core import align_up
from lowtide.files.regular_file import RegularFile
from lowtide.formats import format_of
from lowtide.memory.arena import Arena
from lowtide.reading.file_reader import NUM_READERS, SECTOR_BYTES, FileReader, Piece, Read, Ticket

_NUM_TARGETS = 16
_NUM_THREADS = 2
_SLOTS_BYTES = 256 << 20  # far more than any cache
_GIGA = 1e9


class Disk:
    """The disk that holds a model: its read ceiling, measured again and again."""

    def __init__(self, model: Path, read_bytes: int, total_bytes: int) -> None:
        """Reads of `read_bytes`; `total_bytes` in each measurement, random and sequential.

        model: a folder of safetensors files, or a GGUF file.
        """
        self._model = model
        self._files = [model] if model.is_file() else sorted(model.glob("*.safetensors"))
        self._read_bytes = read_bytes
        self._total_bytes = total_bytes

    def measure(self) -> dict[str, float]:
        """See `read_ceiling`. The model's pages in the page cache are dropped first."""
        drop_pages([self._model])
        return read_ceiling(self._files, self._read_bytes, self._total_bytes)


class SlotReads:
    """Two threads that read whole experts straight into slots and do nothing else.

    Their rate is the least that absent experts cost.
    """

    def __init__(self, files: Sequence[Path], expert_bytes: int) -> None:
        """Slots are touched here; `close` closes the files."""
        self._read_bytes = align_up(expert_bytes, SECTOR_BYTES)
        self._ends = [path.stat().st_size - self._read_bytes for path in files]
        self._descriptors = [_opened_direct(path) for path in files]
        self._num_slots = max(_NUM_TARGETS, _SLOTS_BYTES // self._read_bytes)
        self._slots = Arena(self._num_slots * self._read_bytes).array()
        self._slots[:] = 1

    def measure(self, total_bytes: int, seed: int = 0) -> tuple[float, float]:
        """Seconds a byte, and processor seconds a byte; experts lie anywhere in the files."""
        draw = np.random.default_rng(seed)
        num_reads = max(_NUM_THREADS, total_bytes // self._read_bytes)
        files = draw.integers(len(self._ends), size=num_reads)
        places = [
            (file, int(draw.integers(self._ends[file] + 1)) // SECTOR_BYTES * SECTOR_BYTES)
            for file in files
        ]
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            for done in [threads.submit(self._run, places, i) for i in range(_NUM_THREADS)]:
                done.result()
        seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        num_bytes = num_reads * self._read_bytes
        return seconds / num_bytes, cpu_s / num_bytes

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _run(self, places: Sequence[tuple[int, int]], first: int) -> None:
        for i in range(first, len(places), _NUM_THREADS):
            (file, start), slot = places[i], i % self._num_slots * self._read_bytes
            target = self._slots[slot : slot + self._read_bytes].data
            os.preadv(self._descriptors[file], [target], start)


def _opened_direct(path: Path) -> int:
    """Past the page cache where the file system can."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return os.open(path, os.O_RDONLY)


def read_ceiling(
    files: Sequence[Path], read_bytes: int, total_bytes: int = 1 << 30, seed: int = 0
) -> dict[str, float]:
    """GB/s of lowtide's own reader with nothing else to do: random and sequential reads.

    Every read is of `read_bytes`, an expert's size, as many are queued as there are readers and
    more, and each ends in memory that has been touched before. `total_bytes` in each of the two.
    """
    targets = Arena(_NUM_TARGETS * align_up(read_bytes))
    targets.array()[:] = 1
    reader = FileReader([RegularFile.at(path) for path in files], read_bytes)
    num_reads = max(NUM_READERS, total_bytes // read_bytes)
    draw = np.random.default_rng(seed)
    places = _places(files, read_bytes)
    try:
        rates = {}
        for name in ("random", "sequential"):
            chosen = draw.permutation(len(places)) if name == "random" else range(len(places))
            order = [places[chosen[i % len(places)]] for i in range(num_reads)]
            rates[f"{name}_read_GBps"] = _read_rate(reader, targets, order, read_bytes)
    finally:
        reader.close()
    return {**rates, "read_bytes": read_bytes, "is_direct": reader.is_direct}


def memory_ceiling(num_bytes: int = 256 << 20, repeats: int = 5) -> dict[str, float]:
    """GB/s: reading memory, and copying it (payload), with one thread and with torch's own number.

    Medians over `repeats`, each on a buffer far larger than any cache.
    """
    source = torch.ones(num_bytes // 4)
    target = torch.empty_like(source)
    rates = {}
    default = torch.get_num_threads()
    for num_threads in sorted({1, default}):
        torch.set_num_threads(num_threads)
        read_s = _median_s(lambda: source.sum(), repeats)
        copy_s = _median_s(lambda: target.copy_(source), repeats)
        rates[f"memory_read_{num_threads}_threads_GBps"] = num_bytes / read_s / _GIGA
        rates[f"memory_copy_{num_threads}_threads_GBps"] = num_bytes / copy_s / _GIGA
    torch.set_num_threads(default)
    return rates


def _places(files: Sequence[Path], read_bytes: int) -> list[tuple[int, int]]:
    """Adjacent (file, start) ranges; they begin off every sector boundary, as experts do."""
    offset = 2222
    return [
        (file, start)
        for file, path in enumerate(files)
        for start in range(offset, path.stat().st_size - read_bytes, read_bytes)
    ]


def _read_rate(
    reader: FileReader, targets: Arena, places: Sequence[tuple[int, int]], read_bytes: int
) -> float:
    array, stride, as_is = targets.array(), align_up(read_bytes), format_of("BF16")
    tickets: deque[Ticket] = deque()
    start_s = time.perf_counter()
    for i, (file, start) in enumerate(places):
        if len(tickets) == _NUM_TARGETS:
            tickets.popleft().result()
        slot = i % _NUM_TARGETS * stride
        piece = Piece(0, read_bytes, as_is, array[slot : slot + read_bytes], as_is)
        tickets.append(reader.submit([Read(file, start, read_bytes, (piece,))]))
    for ticket in tickets:
        ticket.result()
    return len(places) * read_bytes / (time.perf_counter() - start_s) / _GIGA


def _median_s(work: Callable[[], object], repeats: int) -> float:
    work()
    seconds = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds)
