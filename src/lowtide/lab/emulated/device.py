"""An emulated device: a second arena in host memory, a slow link to it, and a thread that computes.

So that hybrid execution is tested and timed for real on a machine without a GPU. Time is scaled:
the device computes at the real speed of one compute thread of the host, which is a core unless the
machine has far more than a token has experts, or slower by a factor; copies and the host's experts
are stretched by sleeping to the ratios of a hardware profile. Cores are idle while time is
emulated: the slower the device is made, the less the threads of the emulation get into each
other's way, as those of a real device would not.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.core import IntArray
from lowtide.errors import DeviceError
from lowtide.experts.batched_experts import BatchedExperts
from lowtide.experts.device import ExpertGroup
from lowtide.experts.layout import SlotLayout
from lowtide.experts.rows import ExpertBuffers, ExpertRows, row_pieces
from lowtide.experts.slots import ExpertSlots
from lowtide.kernels.reference import REFERENCE, Kernels
from lowtide.lab.emulated.speeds import EmulatedSpeeds
from lowtide.memory.arena import Region
from lowtide.threads.event import Event
from lowtide.threads.executor import Work
from lowtide.threads.stream import ThreadEvent, ThreadStream

COMPUTE, LINK, HOST = "lowtide-device", "lowtide-link", "lowtide-host"
"""The streams of a timeline; the first two are threads of the device. Those of a second device
end in `-2`."""


class Span(NamedTuple):
    """Something that a device did, in seconds of `perf_counter`."""

    stream: str  # COMPUTE, LINK or HOST
    name: str
    start_s: float
    end_s: float


class EmulatedDevice:
    """Owns the device's slots and its two threads; the host's threads are an executor's.

    The methods are those of `Device`. Copies really copy, then last as long as on the emulated
    link; experts last as long as the emulated speeds say. Products are the host's, so their bits
    equal a run on the host. `timeline`, if set, receives a span per copy, run and host expert.
    """

    torch_device = torch.device("cpu")

    def __init__(
        self,
        arena: Region,
        layout: SlotLayout,
        num_slots: int,
        speeds: EmulatedSpeeds,
        kernels: Kernels = REFERENCE,
        cores_per_expert: int = 1,
    ) -> None:
        """Take `num_slots` slots of `layout` in `arena`.

        cores_per_expert: as on the host, so that an expert has the same bits on either side.
        """
        self.num_slots = num_slots
        self.speeds = speeds
        self.kernels = kernels
        self.timeline: list[Span] | None = None
        self._slots = ExpertSlots(arena, layout)
        self._batched = BatchedExperts.of(self._slots, kernels, num_threads=1)
        self._is_closing = threading.Event()
        self._link_pace, self._compute_pace, self._host_pace = (
            _PacedResource(self._is_closing) for _ in range(3)
        )
        self._link = ThreadStream(LINK)
        self._compute = ThreadStream(COMPUTE, cores_per_expert)
        self._last_run: ThreadEvent | None = None

    def describe(self) -> str:
        """Describe the device's speeds in one line."""
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
            self._run_groups(group.layer, groups, buffers)
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
        """Do nothing: the host has written into `parts` itself."""

    def host_work(self, num_tokens: Sequence[int], work: Work) -> Work:
        """Return `work` stretched to the emulated host's speed; callable on any thread.

        The host is one processor that computes one expert at a time on all its cores, for any
        number of calling threads. It could begin from now on.
        """
        ready_s = perf_counter()

        def stretched() -> None:
            work()
            host_s = sum(map(self.speeds.host_s.at, num_tokens))
            span = self._host_pace.stretch(ready_s, host_s)
            self._note(HOST, f"{len(num_tokens)} experts, {sum(num_tokens)} tokens", *span)

        return stretched

    def join(self) -> None:
        """Raise DeviceError if outputs are missing or anything failed since a drain.

        This includes copies whose events nobody waited for: their experts would use old bytes.
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
        """Fail what is queued and wait for what runs; may be called again."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        for stream in (self._link, self._compute):
            stream.stop()  # both, before either is waited for: one may wait for the other
        for stream in (self._link, self._compute):
            stream.join()
        del self._slots, self._batched

    def _run_groups(self, layer: int, groups: IntArray, buffers: ExpertBuffers) -> None:
        """Run most experts in one call if possible: a real device leaves the interpreter free."""
        if self._batched is not None:
            is_few = self._batched.takes_experts(groups[:, 2])
            self._batched.run(groups[is_few], buffers.parts, buffers.gate, buffers.up, layer)
            groups = groups[~is_few]
        for slot, first, num_pairs in groups.tolist():
            weights = self._slots.weights(layer, slot)
            for piece in row_pieces(num_pairs):
                pairs = slice(first + piece.start, first + piece.stop)
                parts = buffers.parts[pairs]  # an expert's outputs replace its inputs
                gate, up = buffers.gate[pairs], buffers.up[pairs]
                self.kernels.gated_mlp(parts, weights, gate, up, parts)

    def _note(self, stream: str, name: str, start_s: float, end_s: float) -> None:
        if self.timeline is not None:
            self.timeline.append(Span(stream, name, start_s, end_s))


class _PacedResource:
    """A resource that does one thing at a time, each for its emulated duration.

    It works by deadlines, so a thread that wakes up late does not delay what follows.
    """

    def __init__(self, is_closing: threading.Event) -> None:
        self._is_closing = is_closing
        self._lock = threading.Lock()
        self._end_s = 0.0

    def stretch(self, ready_s: float, duration_s: float) -> tuple[float, float]:
        """Wait, after the real work, until the emulated work ends; return its beginning and end.

        Raises DeviceError if the device is closed.
        """
        with self._lock:
            start_s = max(ready_s, self._end_s)
            self._end_s = end_s = max(start_s + duration_s, perf_counter())
        while (left_s := end_s - perf_counter()) > 0:
            if self._is_closing.wait(left_s):
                raise DeviceError("The emulated device was closed while it was in use.")
        return start_s, end_s
