"""`lowtide doctor`: measures this machine, and the costs of experts on it.

First the rates of memory and disk; then, if a model is named, its experts' costs. Results are
stored (`hardware/store.py`), except costs of an emulated device. It ends soon after `LIMIT_S` even
on a busy machine, and reports skipped measurements.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from math import inf
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np

from lowtide.core import MoEShape
from lowtide.devices.cuda import CudaDevice
from lowtide.devices.kind import KINDS, is_paced
from lowtide.doctor.diagnosis import Diagnosis, ExpertCosts, Skipped
from lowtide.engine.opening.config import MAX_PASS_ROWS, EngineConfig
from lowtide.engine.opening.facts import ExpertFacts
from lowtide.engine.opening.model import open_model
from lowtide.engine.running.device import request_of
from lowtide.engine.running.wiring import make_executor
from lowtide.errors import StorageError
from lowtide.experts.device import Device
from lowtide.experts.layout import SlotLayout
from lowtide.experts.transfer import largest_read_bytes
from lowtide.files.folders import cache_folder
from lowtide.hardware.machine import (
    OUT_OF_TIME,
    READ_BYTES,
    Machine,
    Rate,
    measure_rates,
    this_machine,
)
from lowtide.hardware.measure import DiskSource, Measurements, measure_costs
from lowtide.hardware.store import keep_rates, measured_now, stored_or_measured
from lowtide.kernels.library_cache import limit_library_cache
from lowtide.kernels.reference import Kernels
from lowtide.memory.arena import Arena
from lowtide.memory.pinned import PinnedMemory
from lowtide.model_folder.checkpoint import Checkpoint
from lowtide.progress import Progress, no_progress
from lowtide.reading.file_reader import FileReader
from lowtide.threads.executor import HostExecutor

SCRATCH_BYTES = 256 << 20
"""Size of the file for measuring the disk if no model is given."""

LIMIT_S = 30.0
"""No further measurement starts after this time, so that a busy machine also ends in time."""

FILL_LIMIT_S = 5.0
"""Time limit for writing that file; if it is exceeded, the file is shorter."""

_DEVICE_BYTES = 256 << 20  # of slots: more than a GPU's cache holds


def diagnose(
    model: str | Path | None,
    *,
    name: str = "",
    is_fresh: bool = False,
    progress: Progress = no_progress,
    **options: object,
) -> Diagnosis:
    """Measure the machine, and those costs of a model that are not stored.

    model: a folder, a hub id or a demo. name: the model's name, if another. is_fresh: also measure
    stored costs again. options: fields of `EngineConfig`; `device`, `device_options`, `dtype`,
    `kernels` and `config_overrides` affect costs.

    Raises as `open_model` does, StorageError if the checkpoint cannot be read, DeviceError if a
    device fails, and PlanError if there is too little memory to measure the model.
    """
    end_s = perf_counter() + LIMIT_S
    limit_library_cache()
    config = EngineConfig(**options)  # type: ignore[arg-type]
    opened = None if model is None else open_model(model, config)
    skipped: list[Skipped] = []
    named = name or str(model)
    experts = None if opened is None else opened.memory.experts
    if opened is not None and experts is None:
        skipped.append(Skipped(named, "it has no experts"))
    total = 1 if experts is None else 2
    checkpoint = None if opened is None else opened.facts.checkpoint
    progress("measuring", 0, total)
    machine = this_machine()
    rates = machine_rates(machine, checkpoint, skipped, end_s=end_s)
    keep_rates(machine, rates)
    costs: list[ExpertCosts] = []
    if opened is not None and experts is not None:
        progress("measuring", 1, total)
        if perf_counter() < end_s:
            kernels, device = opened.kernels(), opened.memory.device
            # With a GPU reads are not part of the costs, as in the engine, which looks for these
            # when it loads a model; the disk's rate is among the machine's.
            source = None if device == "cuda" else checkpoint
            measured = _ExpertMeasurement(experts, kernels, device, config, source)
            costs.append(measured.costs(named, machine, is_fresh))
        else:
            skipped.append(Skipped(named, OUT_OF_TIME))
    progress("measuring", total, total)
    return Diagnosis(machine, tuple(rates), tuple(costs), tuple(skipped))


def machine_rates(
    machine: Machine,
    checkpoint: Checkpoint | None,
    skipped: list[Skipped],
    *,
    with_products: bool = False,
    end_s: float = inf,
) -> list[Rate]:
    """Measure ceilings of the machine's parts; add what cannot be measured to `skipped`.

    checkpoint: its files are read to measure the disk; without one, a file in the cache folder.
    with_products, end_s: see `measure_rates`.
    """
    with closing(HostExecutor(machine.num_cores)) as executor, ExitStack() as stack:
        file = None
        try:
            file = stack.enter_context(_disk_file(checkpoint))
        except StorageError as error:
            skipped.append(Skipped("disk", str(error)))
        measured = measure_rates(executor, file, with_products=with_products, end_s=end_s)
    skipped += [Skipped(*each) for each in measured.skipped]
    return list(measured.rates)


@contextmanager
def _disk_file(checkpoint: Checkpoint | None) -> Iterator[Path]:
    """Provide the model's largest file, or a temporary one in the cache folder."""
    if checkpoint is not None:
        largest = max(checkpoint.files, key=lambda file: file.num_bytes)
        if largest.num_bytes >= SCRATCH_BYTES // 4:
            yield largest.path
            return
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.NamedTemporaryFile(dir=folder, prefix="doctor-")
    except OSError as error:
        told = f"{folder} cannot be written: {error.strerror}"
        raise StorageError(f"{told}; XDG_CACHE_HOME names another cache folder.") from error
    with scratch:
        _fill(scratch.fileno(), folder)
        yield Path(scratch.name)


def _fill(descriptor: int, folder: Path) -> None:
    """Write incompressible bytes to disk, and drop them from the page cache."""
    block = np.random.default_rng(0).bytes(READ_BYTES)
    end_s = perf_counter() + FILL_LIMIT_S
    try:
        for _ in range(0, SCRATCH_BYTES, READ_BYTES):
            os.write(descriptor, block)
            os.fsync(descriptor)
            if perf_counter() > end_s:
                break
    except OSError as error:
        raise StorageError(
            f"A scratch file of {SCRATCH_BYTES} bytes cannot be written to {folder}: "
            f"{error.strerror}; make room, or name another cache folder in XDG_CACHE_HOME."
        ) from error
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, SCRATCH_BYTES, os.POSIX_FADV_DONTNEED)


_OpenDevice = tuple[Device | None, Callable[[int], Arena], str]


class _ExpertMeasurement(NamedTuple):
    """A measurement of a model's experts on a device, or on the host alone."""

    facts: ExpertFacts
    kernels: Kernels  # the host's
    device: str
    asked: EngineConfig
    checkpoint: Checkpoint | None  # that experts are read from, if reads are a part of the costs

    def costs(self, name: str, machine: Machine, is_fresh: bool) -> ExpertCosts:
        facts = self.facts
        if is_paced(self.device):
            measured, description = self.measure()
            stored = measured_now(measured)
        else:
            folder = None if self.checkpoint is None else self.checkpoint.files[0].path.parent
            key = facts.cost_key(
                machine, self.kernels.name, self.device, self.asked.kernels, folder
            )
            stored = stored_or_measured(key, lambda: self.measure()[0], is_fresh=is_fresh)
            description = key.device
        dtype = facts.layout.describe()
        return ExpertCosts(name, facts.shape, dtype, facts.layer_bytes, description, stored)

    def measure(self) -> tuple[Measurements, str]:
        """Measure; return the costs and a line on the device."""
        with closing(make_executor(self.facts.shape, self.device)) as executor:
            opening = self._open_device(executor.cores_per_expert)
            with opening as (device, make_arena, description), self._disk_source() as disk:
                measured = measure_costs(
                    self.facts.shape,
                    self.facts.layout,
                    executor,
                    self.facts.layer_bytes,
                    device=device,
                    disk=disk,
                    make_arena=make_arena,
                    kernels=self.kernels,
                )
        return measured, description

    @contextmanager
    def _disk_source(self) -> Iterator[DiskSource | None]:
        checkpoint, table = self.checkpoint, self.facts.table
        if checkpoint is None:
            yield None
            return
        with closing(FileReader(checkpoint.files, largest_read_bytes(table))) as reader:
            yield DiskSource(reader, table)

    @contextmanager
    def _open_device(self, cores_per_expert: int) -> Iterator[_OpenDevice]:
        """Open the device with slots for a measurement; yield it, a source and a description."""
        shape, layout = self.facts.shape, self.facts.layout
        num_slots = _num_slots(shape, layout)
        if self.device == "cpu":
            yield None, Arena, ""
        elif self.device == "cuda":
            asked = self.asked.kernels
            with closing(PinnedMemory()) as pinned:
                device = CudaDevice(shape, layout, num_slots, MAX_PASS_ROWS, pinned, asked)
                with closing(device):
                    yield device, pinned.make_arena, self.device
        else:
            given = self.asked.device_options
            request = request_of(self.facts, num_slots, self.kernels, cores_per_expert, given)
            with closing(KINDS[self.device].open(request)) as made:
                yield made.device, made.make_arena, made.device.describe()


def _num_slots(shape: MoEShape, layout: SlotLayout) -> int:
    """Return enough slots for the measured groups, and too many to stay in a cache."""
    num_slots = max(4 * shape.num_experts_per_token, -(-_DEVICE_BYTES // layout.num_bytes))
    return min(num_slots, shape.num_layers * shape.num_experts)
