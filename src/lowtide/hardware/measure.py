"""Measures the costs of one expert, and of the rest of a layer, on this machine.

A measurement takes a few seconds; `store` keeps it for the machine and the model's shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

from lowtide.config import format_size
from lowtide.core import Costs, Curve, MoEShape
from lowtide.errors import PlanError
from lowtide.experts.device import Device
from lowtide.experts.layout import SlotLayout
from lowtide.hardware.cold_weights import ColdWeights, cold_bytes, num_cold_experts
from lowtide.hardware.memory import available_memory_bytes
from lowtide.hardware.streams import (
    MAX_TOKENS,
    DenseStream,
    DeviceDenseStream,
    DeviceStream,
    DiskStream,
    HostStream,
)
from lowtide.hardware.timing import Sample, Timing, repeat_interleaved
from lowtide.kernels.reference import REFERENCE, Kernels
from lowtide.memory.arena import Arena
from lowtide.memory.budget import LARGE_SLOT_BYTES
from lowtide.model_folder.checkpoint import TensorEntry
from lowtide.reading.file_reader import FileReader
from lowtide.schemas import ExpertTable
from lowtide.threads.executor import Executor, HostExecutor, InlineExecutor

NUM_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, MAX_TOKENS)
"""Token counts at which curves have points; for large experts only every other one."""

METHOD = 3
"""Version of the measurements; increased to discard stored costs.

2: on the host, experts of few tokens share one call; on a GPU, a layer has small operators, too.
3: fewer of them with Triton; beside a device the host leaves a core to the calling thread."""

WARM_UP_LIMIT_S = 0.4
COMPUTE_LIMIT_S = 2.5
DISK_LIMIT_S = 1.0
_LEAST_TOKENS = 64  # from here on time surely grows with the tokens, as curves go on


class Point(NamedTuple):
    """One point of a curve."""

    num_tokens: int
    timing: Timing


@dataclass(frozen=True, slots=True)
class Measurements:
    """Every time that costs are made of, with its spread.

    `device`, `link` and `sync` are empty without a device, `disk_read` without a checkpoint.
    """

    expert_bytes: int  # of one slot
    host: tuple[Point, ...]  # one expert
    dense: tuple[Point, ...]  # the rest of one layer
    device: tuple[Point, ...] = ()  # one expert
    link: Timing | None = None  # one expert
    sync: Timing | None = None
    disk_read: Timing | None = None  # one expert
    is_read_direct: bool = False  # past the page cache

    @property
    def spread(self) -> float:
        """The median spread of all timings, as a share of their medians."""
        points = (*self.host, *self.dense, *self.device)
        timings = [point.timing for point in points]
        timings += [t for t in (self.link, self.sync, self.disk_read) if t is not None]
        return median(timing.spread for timing in timings)

    def costs(self) -> Costs:
        """Return the medians. Without a device the host counts as the device, without a link."""
        host_s = _curve(self.host)
        return Costs(
            expert_bytes=self.expert_bytes,
            link_s=0.0 if self.link is None else self.link.median_s,
            host_s=host_s,
            device_s=_curve(self.device) if self.device else host_s,
            dense_s=_curve(self.dense),
            sync_s=0.0 if self.sync is None else self.sync.median_s,
            disk_read_s=0.0 if self.disk_read is None else self.disk_read.median_s,
        )


class DiskSource(NamedTuple):
    """Files with experts, and their places in them."""

    reader: FileReader
    table: ExpertTable


def measure_costs(
    shape: MoEShape,
    layout: SlotLayout,
    executor: HostExecutor,
    dense_bytes: int,
    *,
    device: Device | None = None,
    disk: DiskSource | None = None,
    make_arena: Callable[[int], Arena] = Arena,
    least_cold_bytes: int | None = None,
    kernels: Kernels = REFERENCE,
) -> Measurements:
    """Measure a model's costs, with random weights of its shape.

    layout: of the model's slots. executor: the host's compute threads. dense_bytes: of one layer's
    weights without routed experts (`layer_dense_bytes`). device: with all slots free; they are
    overwritten. disk: the experts' home, if not host memory. make_arena: makes the host memory from
    which the device copies fastest. least_cold_bytes: size of the weights used in turn, by default
    larger than the caches. kernels: the host's.

    Raises PlanError if there is too little memory, StorageError and DeviceError if a read or a
    device fails.
    """
    if least_cold_bytes is None:
        least_cold_bytes = max(cold_bytes(), dense_bytes)
    _check_memory(layout, executor, least_cold_bytes)
    with executor.in_charge(), torch.inference_mode():
        weights = ColdWeights(layout, executor, least_cold_bytes, make_arena)
        try:
            return _measure(shape, weights, executor, dense_bytes, device, disk, kernels)
        except torch.OutOfMemoryError as error:
            raise PlanError(
                f"Measuring what experts cost on the GPU takes about "
                f"{format_size(least_cold_bytes)} of its memory beside the slots; lower "
                f"`gpu_memory`, or free memory that other programs hold: {error}"
            ) from error


def layer_dense_bytes(dense: Mapping[str, TensorEntry], layer: int, item_bytes: int) -> int:
    """Return the bytes of a layer's dense weights; `layer` counts all layers of the model.

    dense: entries by checkpoint name; a layer's names contain `layers.N.`.
    """
    names = [name for name in dense if f".layers.{layer}." in f".{name}"]
    return sum(math.prod(dense[name].shape) for name in names) * item_bytes


def _measure(
    shape: MoEShape,
    weights: ColdWeights,
    executor: Executor,
    dense_bytes: int,
    device: Device | None,
    disk: DiskSource | None,
    kernels: Kernels,
) -> Measurements:
    host = HostStream(shape, weights, executor, device, kernels)
    dense = _dense_stream(shape, weights, executor, dense_bytes, device, kernels)
    streams: list[Callable[[int], float]] = [host.sample, dense.sample]
    others: list[Sample] = []
    if device is not None:
        stream = DeviceStream(shape, weights, device)
        streams.append(stream.sample)
        others = [stream.sample_link, stream.sample_sync]
    is_large = weights.slots.layout.num_bytes > LARGE_SLOT_BYTES
    num_tokens = NUM_TOKENS[::2] if is_large else NUM_TOKENS
    curves, timings = _measure_all(num_tokens, streams, others)
    disk_read: Timing | None = None
    if disk is not None:  # last, because reads overwrite the weights
        reads = DiskStream(disk.reader, disk.table, weights)
        reads.sample()
        [disk_read] = repeat_interleaved([reads.sample], DISK_LIMIT_S)
    return Measurements(
        expert_bytes=weights.slots.layout.num_bytes,
        host=curves[0],
        dense=curves[1],
        device=() if device is None else curves[2],
        link=None if device is None else timings[0],
        sync=None if device is None else timings[1],
        disk_read=disk_read,
        is_read_direct=disk is not None and disk.reader.is_direct,
    )


def _measure_all(
    num_tokens: Sequence[int],
    streams: Sequence[Callable[[int], float]],
    others: Sequence[Sample],
) -> tuple[list[tuple[Point, ...]], list[Timing]]:
    """Measure a curve for each stream and a timing for each of `others`, repeats interleaved."""
    counts = [_warm_up(num_tokens, stream) for stream in streams]
    for sample in others:
        sample()
    samples = [partial(stream, n) for stream, ns in zip(streams, counts, strict=True) for n in ns]
    timings = iter(repeat_interleaved([*samples, *others], COMPUTE_LIMIT_S))
    curves = [tuple(Point(n, next(timings)) for n in ns) for ns in counts]
    return curves, list(timings)


def _warm_up(num_tokens: Sequence[int], stream: Callable[[int], float]) -> list[int]:
    """Sample each of `num_tokens` once; return those that there is time to repeat.

    Large experts on slow cores have fewer.
    """
    start_s = perf_counter()
    counts: list[int] = []
    for count in num_tokens:
        is_late = perf_counter() - start_s > WARM_UP_LIMIT_S
        if is_late and counts and counts[-1] >= _LEAST_TOKENS:
            break
        stream(count)
        counts.append(count)
    return counts


def _dense_stream(
    shape: MoEShape,
    weights: ColdWeights,
    executor: Executor,
    dense_bytes: int,
    device: Device | None,
    kernels: Kernels,
) -> DenseStream | DeviceDenseStream:
    if device is None:
        return DenseStream(shape, weights, executor, dense_bytes, kernels)
    if device.torch_device.type == "cpu":  # emulated, by the one core that calls
        return DenseStream(shape, weights, InlineExecutor(), dense_bytes, kernels)
    dtype = weights.slots.layout.dtype
    return DeviceDenseStream(shape, dtype, device.torch_device, dense_bytes, device.kernels)


def _check_memory(layout: SlotLayout, executor: Executor, least_cold_bytes: int) -> None:
    num_experts = num_cold_experts(layout, executor.num_threads, least_cold_bytes)
    needed, free = num_experts * layout.num_bytes, available_memory_bytes()
    if needed > free // 2:
        raise PlanError(
            f"Measuring experts of {format_size(layout.num_bytes)} takes {num_experts} of them, "
            f"{format_size(needed)} of host memory; half of what is free is "
            f"{format_size(free // 2)}. Close other programs first."
        )


def _curve(points: tuple[Point, ...]) -> Curve:
    return Curve([(point.num_tokens, point.timing.median_s) for point in points])
