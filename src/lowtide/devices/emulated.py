"""An emulated device: a second arena in host memory, a slow link to it, and a thread that computes.

So that hybrid execution is tested and timed for real on a machine without a GPU. Time is scaled:
the device computes at the real speed of one compute thread of the host, which is a core unless the
machine has far more than a token has experts, or slower by a factor; copies and the host's experts
are stretched by sleeping to the ratios of a hardware profile. Cores are idle while time is
emulated: the slower the device is made, the less the threads of the emulation get into each
other's way, as those of a real device would not.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter, thread_time
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtide.core import Curve, IntArray, MoEShape
from lowtide.errors import DeviceError, UsageError
from lowtide.experts.at_once import ExpertsAtOnce
from lowtide.experts.device import ExpertGroup
from lowtide.experts.rows import ExpertBuffers, ExpertRows
from lowtide.experts.slots import ExpertSlots, SlotLayout
from lowtide.kernels.operands import ClampedWeights, ExpertWeights
from lowtide.kernels.reference import REFERENCE, Kernels
from lowtide.memory.arena import Arena
from lowtide.profiles import load_profile
from lowtide.threads.event import Event
from lowtide.threads.executor import Work, process_threads_kept, set_cores_per_product
from lowtide.threads.stream import ThreadEvent, ThreadStream

_Weights = ExpertWeights | ClampedWeights

COMPUTE, LINK, HOST = "lowtide-device", "lowtide-link", "lowtide-host"
"""The streams of a timeline; the first two are threads of the device. Those of a second device
end in `-2`."""

_PROFILE = "rtx3090"
# Name: least value. What is faster than it is here cannot be had by sleeping.
_OPTIONS: Mapping[str, float] = {
    "link_GBps": 1e-6,
    "link_latency_us": 0.0,
    "host_slowdown": 1.0,
    "device_slowdown": 1.0,
}
_DEVICES = "devices"
_MAX_DEVICES = 8

_COLD_BYTES = 32 << 20  # weights of the measurement: far more than a core's own caches
_MEASURE_S = 0.15  # of measured rounds
_MIN_ROUNDS = 3
_MAX_TOKENS = 512  # rows of the largest pass


@dataclass(frozen=True)
class EmulatedSpeeds:
    """What an emulated device pretends to be, in the scaled time that starts from `device_s`."""

    link_bytes_per_s: float
    link_latency_s: float  # of each copy
    host_slowdown: float  # the host's time for an expert of one token over the device's
    device_s: Curve  # one expert on the device
    origin: str = "as given"  # where the ratios are from, for people
    host_curve: Curve | None = None  # one expert on the host; None: that ratio at any token count
    device_slowdown: float = 1.0  # the device's time over that of a core of this machine

    def link_s(self, num_bytes: int) -> float:
        """Seconds of one copy."""
        return self.link_latency_s + num_bytes / self.link_bytes_per_s

    @cached_property
    def host_s(self) -> Curve:
        """Seconds of one expert on the host."""
        return self.host_curve or self.device_s.scaled(self.host_slowdown)

    def describe(self) -> str:
        slowly = f"device as {self.device_slowdown:.3g} times a core's time, "
        return (
            f"emulated: link {self.link_bytes_per_s / 1e9:.3g} GB/s + "
            f"{self.link_latency_s * 1e6:.0f} us, {slowly if self.device_slowdown > 1 else ''}"
            f"host {self.host_slowdown:.1f}x slower than the device at one token ({self.origin})"
        )


def check_emulated_options(options: Mapping[str, str]) -> dict[str, float]:
    """The values of `device_options` that are speeds, by name; needs no model.

    Known are `link_GBps` and `link_latency_us` of the emulated link; `host_slowdown`, the host's
    time for an expert over the device's at any token count; `device_slowdown`, the device's over
    that of a core of this machine; and `devices`, how many there are, each with that link. Raises
    UsageError.
    """
    num_emulated_devices(options)
    values = {}
    for name, text in options.items():
        if name == _DEVICES:
            continue
        if name not in _OPTIONS:
            known = ", ".join([*_OPTIONS, _DEVICES])
            raise UsageError(f"The emulated device has no option {name!r}; choose {known}.")
        values[name] = _number(name, text)
    return values


def num_emulated_devices(options: Mapping[str, str]) -> int:
    """The option `devices`, by default 1. Raises UsageError."""
    text = str(options.get(_DEVICES, 1))
    if text not in map(str, range(1, _MAX_DEVICES + 1)):
        raise UsageError(
            f"Device option {_DEVICES} must be a whole number from 1 to {_MAX_DEVICES}, not "
            f"{text!r}."
        )
    return int(text)


def _number(name: str, text: str) -> float:
    least = _OPTIONS[name]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= least):
        raise UsageError(f"Device option {name} must be a number from {least:g}, not {text!r}.")
    return value


def emulated_speeds(
    options: Mapping[str, str],
    layout: SlotLayout,
    shape: MoEShape,
    dtype: torch.dtype,
    kernels: Kernels = REFERENCE,
    cores_per_expert: int = 1,
) -> EmulatedSpeeds:
    """Speeds for a model's experts: the device's measured here, the rest by the profile's ratios.

    All of the profile's times are stretched by one factor, which makes its device's time for an
    expert with one token what it is on a core of this machine, or `device_slowdown` times that.
    With more tokens the host falls behind as it does in the profile, where its arithmetic is the
    limit before the device's. `options` replace parts (see `check_emulated_options`). Takes about
    0.3 s. Raises UsageError.
    """
    given = check_emulated_options(options)
    device_slowdown = given.get("device_slowdown", 1.0)
    core_s = measure_device_s(layout, shape, kernels, cores_per_expert)
    device_s = core_s.scaled(device_slowdown)
    profile = load_profile(_PROFILE)
    costs = profile.costs(shape, dtype.itemsize)
    stretch = device_s.at(1) / costs.device_s.at(1)
    values = {
        "link_GBps": profile.link_bytes_per_s / 1e9 / stretch,
        "link_latency_us": profile.link_latency_s * 1e6 * stretch,
        "host_slowdown": costs.host_s.at(1) / costs.device_s.at(1),
        **given,
    }
    origin = f"{profile.name}, scaled"
    return EmulatedSpeeds(
        link_bytes_per_s=1e9 * values["link_GBps"],
        link_latency_s=1e-6 * values["link_latency_us"],
        host_slowdown=values["host_slowdown"],
        device_s=device_s,
        origin=f"{origin}; as given: {', '.join(given)}" if given else origin,
        host_curve=None if "host_slowdown" in given else costs.host_s.scaled(stretch),
        device_slowdown=device_slowdown,
    )


def measure_device_s(
    layout: SlotLayout,
    shape: MoEShape,
    kernels: Kernels = REFERENCE,
    cores_per_expert: int = 1,
) -> Curve:
    """Seconds of one expert's gated MLP on one compute thread, by tokens: 1, 2, 4 and so on.

    Medians of rounds over all counts, each product with weights that have not been used for a
    while, as in a model. Of a very large expert a slice is measured: time goes with its width.
    """
    row_bytes = 3 * shape.hidden_size * layout.dtype.itemsize
    width = min(shape.expert_size, max(1, _COLD_BYTES // 2 // row_bytes))
    is_clamped = len(layout.shapes) > 3
    part = SlotLayout.of(shape._replace(expert_size=width), layout.dtype, is_clamped)
    experts = _cold_experts(part)
    with process_threads_kept(), torch.inference_mode():
        set_cores_per_product(cores_per_expert)
        counts = _affordable_counts(experts, kernels)
        rounds: list[list[float]] = []
        end_s = perf_counter() + _MEASURE_S
        while len(rounds) < _MIN_ROUNDS or perf_counter() < end_s:
            rounds.append([_mlp_s(num_tokens, experts, kernels) for num_tokens in counts])
    seconds = np.median(rounds, axis=0) * (shape.expert_size / width)
    # What took longer than more tokens did was held up by something.
    seconds = np.minimum.accumulate(seconds[::-1])[::-1]
    return Curve(list(zip(counts, seconds.tolist(), strict=True)))


def _cold_experts(layout: SlotLayout) -> Iterator[_Weights]:
    """Experts in turn, for ever, together too large for a core's caches."""
    num_experts = max(2, math.ceil(_COLD_BYTES / layout.num_bytes))
    arena = Arena(num_experts * layout.num_bytes)
    arena.bytes.view(layout.dtype).fill_(0.01)
    slots = ExpertSlots(arena, layout)
    return itertools.cycle([slots.weights(i) for i in range(num_experts)])


def _affordable_counts(experts: Iterator[_Weights], kernels: Kernels) -> list[int]:
    """Token counts, at least two, of which the least number of rounds fits into the time."""
    counts: list[int] = []
    num_tokens, round_s, last_s = 1, 0.0, 0.0
    while num_tokens <= _MAX_TOKENS and (
        len(counts) < 2 or round_s + 2 * last_s < _MEASURE_S / _MIN_ROUNDS
    ):
        # The first product of its size does more than compute.
        _mlp_s(num_tokens, experts, kernels)
        last_s = _mlp_s(num_tokens, experts, kernels)
        round_s += last_s
        counts.append(num_tokens)
        num_tokens *= 2
    return counts


def _mlp_s(num_tokens: int, experts: Iterator[_Weights], kernels: Kernels) -> float:
    """Seconds of the next expert's products, by the thread's clock: others use the core too."""
    weights = next(experts)
    (width, hidden), dtype = weights.gate.shape, weights.gate.dtype
    x, out, gate, up = (
        torch.full((num_tokens, size), 0.01, dtype=dtype) for size in (hidden, hidden, width, width)
    )
    start_s = thread_time()
    kernels.gated_mlp(x, weights, gate, up, out)
    return thread_time() - start_s


class Span(NamedTuple):
    """Something that a device did, in seconds of `perf_counter`."""

    stream: str  # COMPUTE, LINK or HOST
    name: str
    start_s: float
    end_s: float


class EmulatedDevice:
    """Owns the device's slots and its two threads; the host's threads are an executor's.

    The methods are those of `Device`. Copies really copy, then last as long as on the link, and
    experts as long as its speeds say; products are the host's, so their bits are those of a run
    there. `timeline`, where set, receives a span per copy, run and host expert.
    """

    name = "emulated"
    torch_device = torch.device("cpu")

    def __init__(
        self,
        arena: Arena,
        layout: SlotLayout,
        num_slots: int,
        speeds: EmulatedSpeeds,
        kernels: Kernels = REFERENCE,
        number: int = 1,
        cores_per_expert: int = 1,
    ) -> None:
        """`arena` holds `num_slots` slots of `layout`; number: which of several it is.
        cores_per_expert: the host's, so that an expert has the same bits on either side."""
        self.num_slots = num_slots
        self.speeds = speeds
        self.kernels = kernels
        self.timeline: list[Span] | None = None
        self._slots = ExpertSlots(arena, layout)
        self._at_once = ExpertsAtOnce.of(self._slots, kernels, num_threads=1)
        self._is_closing = threading.Event()
        self._link_pace, self._compute_pace, self._host_pace = (
            _Pace(self._is_closing) for _ in range(3)
        )
        suffix = f"-{number}" if number > 1 else ""
        self._link = ThreadStream(LINK + suffix)
        self._compute = ThreadStream(COMPUTE + suffix, cores_per_expert)
        self._last_run: ThreadEvent | None = None

    def describe(self) -> str:
        """One line on its speeds, for people."""
        return self.speeds.describe()

    def copy(self, source: Tensor, slot: int, after: Event | None) -> ThreadEvent:
        def work(ready_s: float) -> None:
            image = self._slots.image(slot)
            image.copy_(source)
            link_s = self.speeds.link_s(image.nbytes)
            self._note(self._link.name, f"copy {slot}", *self._link_pace.stretch(ready_s, link_s))

        return self._link.queue(work, after)

    def run(
        self, group: ExpertGroup, rows: ExpertRows, buffers: ExpertBuffers, after: Event | None
    ) -> ThreadEvent:
        # Looked up here: the first look makes `rows.bounds`, which threads must not.
        groups = rows.groups(group.experts, group.slots)
        groups = groups[groups[:, 2] > 0]

        def work(ready_s: float) -> None:
            self._run_groups(groups, buffers)
            run_s = float(self.speeds.device_s(groups[:, 2]).sum())
            name = f"run {group.experts.tolist()}"
            self._note(self._compute.name, name, *self._compute_pace.stretch(ready_s, run_s))

        self._last_run = self._compute.queue(work, after)
        return self._last_run

    def to_host(self, x: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        return x, experts

    def host_parts(self, parts: Tensor) -> Tensor:
        return parts

    def stage(self, predicted: Tensor) -> Tensor:
        return predicted

    def from_host(
        self, host_parts: Tensor, rows: ExpertRows, experts: IntArray, parts: Tensor
    ) -> None:
        """Nothing: the host has written into `parts` itself."""

    def host_work(self, num_tokens: Sequence[int], work: Work) -> Work:
        """`work`, ended when the emulated host would have; call it on any thread.

        The host is one processor: it computes one expert at a time, on all its cores, whatever
        the number of threads that call. It could begin from now on.
        """
        ready_s = perf_counter()

        def stretched() -> None:
            work()
            host_s = sum(map(self.speeds.host_s.at, num_tokens))
            span = self._host_pace.stretch(ready_s, host_s)
            self._note(HOST, f"{len(num_tokens)} experts, {sum(num_tokens)} tokens", *span)

        return stretched

    def join(self) -> None:
        """Raises DeviceError when the outputs have not come, or anything failed since a drain.

        Also for a copy whose own event nobody asked: its expert would be computed from old bytes.
        """
        if self._last_run is not None:
            self._last_run.wait()
        for stream in (self._link, self._compute):
            stream.check()

    def drain(self) -> None:
        for stream in (self._link, self._compute):
            stream.drain()
        self._last_run = None  # it may have failed, and what comes next need not run anything

    def close(self) -> None:
        """What is queued fails; what is under way is waited for. Again: does nothing."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        for stream in (self._link, self._compute):
            stream.stop()  # both, before either is waited for: one may wait for the other
        for stream in (self._link, self._compute):
            stream.join()
        del self._slots, self._at_once

    def _run_groups(self, groups: IntArray, buffers: ExpertBuffers) -> None:
        """Most in one call, where there is one: a real device leaves the interpreter alone."""
        if self._at_once is not None:
            is_few = self._at_once.takes_experts(groups[:, 2])
            self._at_once.run(groups[is_few], buffers.parts, buffers.gate, buffers.up)
            groups = groups[~is_few]
        for slot, first, num_pairs in groups.tolist():
            pairs = slice(first, first + num_pairs)
            parts = buffers.parts[pairs]  # an expert's outputs replace its inputs
            weights = self._slots.weights(slot)
            self.kernels.gated_mlp(parts, weights, buffers.gate[pairs], buffers.up[pairs], parts)

    def _note(self, stream: str, name: str, start_s: float, end_s: float) -> None:
        if self.timeline is not None:
            self.timeline.append(Span(stream, name, start_s, end_s))


class _Pace:
    """Something that does one thing at a time, each for as long as is emulated.

    Goes by deadlines: that a thread wakes up late does not delay what comes next.
    """

    def __init__(self, is_closing: threading.Event) -> None:
        self._is_closing = is_closing
        self._lock = threading.Lock()
        self._end_s = 0.0

    def stretch(self, ready_s: float, duration_s: float) -> tuple[float, float]:
        """Called when the real work is done; returns when the emulated work is.

        The answer is when that began and ended. Raises DeviceError when the device is closed.
        """
        with self._lock:
            start_s = max(ready_s, self._end_s)
            self._end_s = end_s = max(start_s + duration_s, perf_counter())
        while (left_s := end_s - perf_counter()) > 0:
            if self._is_closing.wait(left_s):
                raise DeviceError("The emulated device was closed while it was in use.")
        return start_s, end_s
