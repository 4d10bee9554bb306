"""Names this machine, and measures how fast its parts are at best.

These rates are ceilings to compare a model's costs with. Bounds of predicted speeds use them
(`engine/planning/prediction.py`); policies do not.
"""

from __future__ import annotations

import functools
import itertools
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch

from lowtide.core import ALIGNMENT
from lowtide.errors import PlanError, StorageError
from lowtide.files.regular_file import RegularFile
from lowtide.formats import format_of
from lowtide.hardware.cold_weights import cold_bytes
from lowtide.hardware.memory import total_memory_bytes
from lowtide.hardware.timing import Sample, repeat_interleaved
from lowtide.kernels.cpu.reader import PIECE_BYTES
from lowtide.memory.arena import Arena
from lowtide.reading.file_reader import FileReader, Piece, Read
from lowtide.threads.executor import MAX_THREADS, Executor, HostExecutor, Work

RATE_LIMIT_S = 1.0
READ_BYTES = 16 << 20
"""Bytes of one sequential read; the reader has several in progress."""

QUICK_BYTES = 64 << 20
QUICK_READS = 3

READ_LIMIT_S = 10.0
"""Time limit of one read in a disk measurement."""

_MAX_READS = 32  # of one sample: half a GiB
_MAX_PIECES = 128
_NEARLY = 0.97  # of the best rate: fewer reads at once leave the processor more time
PRODUCT_SIZE = 2048
_LINK_BYTES = 256 << 20

RATES_METHOD = 6
"""Version of the measurements; increased to discard stored rates of the same names."""

MEMORY_READ = "memory read"
DISK_READ = "disk, sequential"
"""Common beginning of these rates' names."""

PIECES_AT_ONCE = {f"disk, pieces of 1 MiB, {n} at once": n for n in (1, 2, 4, 8)}
"""Names of rates -> number of reads in progress; experts are read in such pieces."""

DISTURBED = 1.5
"""A machine counts as busy if half of the repeats take this many times the best one."""

MOST_TRIES = 2
"""Most measurements of a disturbed rate, the first included."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that measurements are valid for; a changed machine is measured again."""

    cpu: str
    num_cores: int  # that this process may use
    memory_bytes: int
    kernel: str
    gpu: str | None


class Rate(NamedTuple):
    """A speed in units per second, from the median of repeats.

    `ceiling` is the possible speed: by specification if the system tells, else from the best
    repeat.
    """

    name: str
    unit: str  # "B" or "FLOP"
    per_s: float
    spread: float  # of the repeats, as a share of the median
    ceiling: float
    is_specified: bool = False  # the ceiling

    @property
    def is_disturbed(self) -> bool:
        """True if most repeats took much longer than the best one: the machine was in use."""
        return not self.is_specified and self.ceiling > DISTURBED * self.per_s


def this_machine() -> Machine:
    """Return the machine's names and sizes as the system reports them."""
    has_gpu = torch.cuda.is_available()
    return Machine(
        cpu=cpu_model(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=total_memory_bytes(),
        kernel=f"{platform.system()} {platform.release()}",
        gpu=torch.cuda.get_device_name(0) if has_gpu else None,
    )


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name, family and model, or its architecture if unknown.

    On a rented machine one name can cover several generations, whose products differ.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    facts: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    name = facts.get("model name") or platform.machine()
    if "cpu family" not in facts or "model" not in facts:
        return name
    return f"{name} (family {facts['cpu family']}, model {facts['model']})"


OUT_OF_TIME = "there was no time left; measure again when the machine is less busy."


class Measured(NamedTuple):
    """Rates, and parts that were not measured, each with the reason."""

    rates: tuple[Rate, ...]
    skipped: tuple[tuple[str, str], ...] = ()


def measure_rates(
    executor: HostExecutor, file: Path | None, *, with_products: bool = False, end_s: float = inf
) -> Measured:
    """Measure memory and disk, then the GPU's memory and link if there is one.

    executor: with a thread for each core. file: read to measure the disk, past the page cache if
    possible; at least `READ_BYTES` long; None leaves the disk out. with_products: also arithmetic.
    end_s: by `perf_counter`; no part starts after it. An unreadable disk is skipped.
    """
    parts: dict[str, Callable[[], list[Rate]]] = {"memory": partial(_memory_rates, executor)}
    if with_products:
        parts["arithmetic"] = partial(_product_rates, executor)
    if file is not None:
        parts["disk"] = lambda: [_disk_rate(file), *_piece_rates(file)]
    if torch.cuda.is_available():
        parts["GPU"] = partial(_gpu_rates, torch.device("cuda", 0))
    rates, skipped = list[Rate](), list[tuple[str, str]]()
    with executor.in_charge(), torch.inference_mode():
        for name, measure in parts.items():
            if perf_counter() > end_s:
                skipped.append((name, OUT_OF_TIME))
                continue
            try:
                rates += measure()
            except StorageError as error:
                skipped.append((name, str(error)))
    return Measured(tuple(rates), tuple(skipped))


def best_at_once(rates: Sequence[Rate]) -> int | None:
    """Return the number of concurrent reads that is best for this disk; None if not measured."""
    found = {PIECES_AT_ONCE[each.name]: each.per_s for each in rates if each.name in PIECES_AT_ONCE}
    enough = _NEARLY * max(found.values(), default=0.0)
    return min((n for n, per_s in found.items() if per_s >= enough), default=None)


def disk_rate(rates: Sequence[Rate]) -> float | None:
    """Return bytes per second of side-by-side reads in an expert's pieces; None if not measured."""
    return max((each.per_s for each in rates if each.name in PIECES_AT_ONCE), default=None)


def memory_rate(rates: Sequence[Rate]) -> float | None:
    """Return the bytes per second that all threads read together; None if not measured."""
    return next((each.per_s for each in rates if each.name == MEMORY_READ), None)


@functools.cache
def quick_memory_rate() -> float | None:
    """Return the best rate of a few reads of `QUICK_BYTES`; caches may make it too high.

    None if there is no memory for that.
    """
    try:
        with closing(HostExecutor(MAX_THREADS)) as executor, executor.in_charge():
            reads = _reads(Arena(QUICK_BYTES).bytes.fill_(1), executor.num_threads)
            return QUICK_BYTES / min(_time(executor, reads) for _ in range(QUICK_READS))
    except PlanError:
        return None


def rate_of(
    name: str, unit: str, amount: float, sample: Sample, specified: float | None = None
) -> Rate:
    """Measure a rate by samples of `amount` units each, after one for warm-up."""
    [rate] = rates_of({name: sample}, unit, amount)
    return rate if specified is None else rate._replace(ceiling=specified, is_specified=True)


def rates_of(samples: Mapping[str, Sample], unit: str, amount: float) -> Iterator[Rate]:
    """Measure several rates with interleaved repeats; repeat disturbed ones."""
    for sample in samples.values():
        sample()
    rates: dict[str, Rate] = {}
    for _ in range(MOST_TRIES):
        asked = [name for name in samples if name not in rates or rates[name].is_disturbed]
        timings = repeat_interleaved([samples[name] for name in asked], RATE_LIMIT_S)
        for name, timing in zip(asked, timings, strict=True):
            per_s, best_per_s = amount / timing.median_s, amount / timing.least_s
            new = Rate(name, unit, per_s, timing.spread, best_per_s)
            faster = max(rates.get(name, new), new, key=lambda rate: rate.per_s)
            best_per_s = max(best_per_s, rates.get(name, new).ceiling)
            rates[name] = faster._replace(ceiling=best_per_s)
        if not any(rate.is_disturbed for rate in rates.values()):
            break
    yield from rates.values()


def pcie_bytes_per_s(folder: Path) -> float | None:
    """Return the ceiling of a PCI Express link, from a device's folder below /sys/bus/pci/devices.

    Transfers per second and lane, times lanes, less the line code: 8 of 10 bits in generations 1
    and 2, 128 of 130 from 3 on (PCI Express Base Specification). None if unknown.
    """
    try:
        # A GPU at rest slows its link down, but does not narrow it.
        speed = float((folder / "max_link_speed").read_text().split()[0])
        width = int((folder / "current_link_width").read_text())
    except (OSError, ValueError, IndexError):
        return None
    code = 128 / 130 if speed >= 8 else 8 / 10
    return speed * 1e9 * width * code / 8


def _memory_rates(executor: Executor) -> list[Rate]:
    """Measure reading and copying data that no cache holds, divided among all threads."""
    num_bytes = cold_bytes() // 2
    source, target = Arena(num_bytes).bytes, Arena(num_bytes).bytes
    source.fill_(1)
    reads = _reads(source, executor.num_threads)
    parts = zip(*(_parts(each, executor.num_threads) for each in (source, target)), strict=True)
    copies = [partial(_copy, one, other) for one, other in parts]
    return [
        rate_of(MEMORY_READ, "B", num_bytes, partial(_time, executor, reads)),
        rate_of(
            "memory copy, read and written", "B", 2 * num_bytes, partial(_time, executor, copies)
        ),
    ]


def _reads(source: torch.Tensor, num_threads: int) -> list[Work]:
    return [partial(_read, part.view(torch.float32)) for part in _parts(source, num_threads)]


def _parts(memory: torch.Tensor, num_threads: int) -> Sequence[torch.Tensor]:
    """Divide memory into aligned parts of equal size, one per thread."""
    step = -(-len(memory) // num_threads // ALIGNMENT) * ALIGNMENT
    return torch.split(memory, step)


def _product_rates(executor: Executor) -> list[Rate]:
    """Measure a large product on all threads at once, in the types that models have."""
    rates = []
    for dtype in (torch.bfloat16, torch.float32):
        matrix = torch.ones((PRODUCT_SIZE, PRODUCT_SIZE), dtype=dtype)
        outs = [torch.empty_like(matrix) for _ in range(executor.num_threads)]
        works = [partial(_multiply, matrix, out) for out in outs]
        num_operations = 2 * PRODUCT_SIZE**3 * len(works)
        sample = partial(_time, executor, works)
        name = f"products in {str(dtype).removeprefix('torch.')}"
        rates.append(rate_of(name, "FLOP", num_operations, sample))
    return rates


def _disk_rate(path: Path) -> Rate:
    """Measure large consecutive reads."""
    file, as_is = RegularFile.at(path), format_of("BF16")
    with closing(FileReader([file], READ_BYTES)) as reader:
        targets = [Arena(READ_BYTES).array() for _ in range(4)]
        reads = [
            Read(0, i * READ_BYTES, READ_BYTES, (piece,))
            for i in range(min(_MAX_READS, file.num_bytes // READ_BYTES))
            for piece in [Piece(0, READ_BYTES, as_is, targets[i % len(targets)], as_is)]
        ]
        how = "direct" if reader.is_direct else "through the page cache"
        return _rate_of_reads(f"{DISK_READ}, {how}", reader, reads)


def _piece_rates(path: Path) -> list[Rate]:
    """Measure reads of pieces in random order, by different numbers of threads."""
    file, as_is = RegularFile.at(path), format_of("BF16")
    num_pieces = min(_MAX_PIECES, file.num_bytes // PIECE_BYTES)
    starts = np.random.default_rng(0).permutation(file.num_bytes // PIECE_BYTES) * PIECE_BYTES
    rates = []
    for name, at_once in PIECES_AT_ONCE.items():
        targets = [Arena(PIECE_BYTES).array() for _ in range(at_once)]
        reads = [
            Read(0, start, PIECE_BYTES, (Piece(0, PIECE_BYTES, as_is, target, as_is),))
            for start, target in zip(starts[:num_pieces].tolist(), itertools.cycle(targets))
        ]
        with closing(FileReader([file], PIECE_BYTES, num_readers=at_once)) as reader:
            rates.append(_rate_of_reads(name, reader, reads))
    return rates


def _rate_of_reads(name: str, reader: FileReader, reads: Sequence[Read]) -> Rate:
    """Time as many of `reads` as take a quarter of `RATE_LIMIT_S` together, at least four."""
    few = reads[:4]
    enough = int(len(few) * RATE_LIMIT_S / 4 / _time_reads(reader, few))
    reads = reads[: max(len(few), enough)]
    num_bytes = sum(read.num_bytes for read in reads)
    return rate_of(name, "B", num_bytes, partial(_time_reads, reader, reads))


def _gpu_rates(device: torch.device) -> list[Rate]:
    on_device = torch.ones(_LINK_BYTES, dtype=torch.uint8, device=device)
    other = torch.empty_like(on_device)
    pinned = torch.ones(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    ceiling = pcie_bytes_per_s(_pci_folder(device))
    memory = partial(_time_on_gpu, on_device, other)
    link = partial(_time_on_gpu, pinned, on_device)
    return [
        rate_of("GPU memory copy, read and written", "B", 2 * _LINK_BYTES, memory),
        rate_of("link, host to GPU, pinned", "B", _LINK_BYTES, link, ceiling),
    ]


def _pci_folder(device: torch.device) -> Path:
    """Return Linux's folder of the GPU's slot; a missing folder if torch does not name the slot."""
    properties = torch.cuda.get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")  # not in every torch
    domain, bus, slot = (getattr(properties, name, 0) for name in names)
    return Path(f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{slot:02x}.0")


def _time(executor: Executor, works: Sequence[Work]) -> float:
    start_s = perf_counter()
    executor.run(works)
    return perf_counter() - start_s


def _time_reads(reader: FileReader, reads: Sequence[Read]) -> float:
    start_s = perf_counter()
    try:
        for ticket in [reader.submit([read]) for read in reads]:
            ticket.result(READ_LIMIT_S)
    except TimeoutError as error:
        raise StorageError(
            f"A read of {reads[0].num_bytes >> 20} MiB has not ended within {READ_LIMIT_S:g} s; "
            "its drive does not answer. Try again, or copy the model to another."
        ) from error
    return perf_counter() - start_s


def _time_on_gpu(source: torch.Tensor, target: torch.Tensor) -> float:
    torch.cuda.synchronize()
    start_s = perf_counter()
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return perf_counter() - start_s


def _read(source: torch.Tensor) -> None:
    """Read source [elements] float32."""
    torch.sum(source)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def _multiply(matrix: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(matrix, matrix, out=out)
