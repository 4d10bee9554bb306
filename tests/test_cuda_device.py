"""The CUDA device: its logic on stand-in streams here, all of it on a GPU with `-m gpu`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
from cuda_stand_ins import StandInCudart, StandInMark, StandInStreams
from test_triton_packed import NAMES, fill
from torch import Tensor

from lowtide.core import MoEShape
from lowtide.devices import cuda
from lowtide.devices.cuda import CudaDevice, pinned_bytes
from lowtide.errors import DeviceError, InternalError, PlanError
from lowtide.experts.device import ExpertGroup
from lowtide.experts.layout import SlotLayout
from lowtide.experts.rows import ExpertBuffers, ExpertRows
from lowtide.experts.slots import ExpertSlots
from lowtide.formats import formats
from lowtide.kernels import choice, triton_experts, triton_routing
from lowtide.kernels.operands import ClampedWeights, ExpertWeights
from lowtide.kernels.reference import REFERENCE
from lowtide.memory.arena import Arena
from lowtide.memory.cuda_streams import CudaEvent, CudaStreams
from lowtide.memory.pinned import PinnedMemory

SHAPE = MoEShape(1, num_experts=6, num_experts_per_token=2, hidden_size=96, expert_size=32)
LAYOUT = SlotLayout.of(SHAPE, torch.float32)
MAX_ROWS = 40
NUM_SLOTS = 4


class HostExperts(ExpertSlots):
    """All experts in host memory, expert e in slot e."""

    def __init__(self, layout: SlotLayout = LAYOUT, num_experts: int = SHAPE.num_experts) -> None:
        self.arena = Arena(num_experts * layout.num_bytes)
        super().__init__(self.arena, layout)
        draw = np.random.default_rng(0)
        for expert in range(num_experts):
            for part in layout.largest.parts:
                fill(part, self.image(expert)[part.offsets[0] :][: part.num_bytes[0]].numpy(), draw)


def layout_of(shape: MoEShape, dtype: torch.dtype, stored: str) -> SlotLayout:
    """stored: a format's name; nothing: plain. MXFP4 as gpt-oss has it, clamped with biases."""
    if not stored:
        return SlotLayout.of(shape, dtype)
    weights = ClampedWeights if stored == "MXFP4" else ExpertWeights
    return SlotLayout.of(shape, dtype, weights, [(formats()[stored],) * 3] * shape.num_layers)


def make_device(
    home: HostExperts,
    streams: StandInStreams | None = None,
    kernels: str = "auto",
    is_pinned: bool = True,
) -> CudaDevice:
    pinned = PinnedMemory(StandInCudart())
    if is_pinned:
        pinned.register(home.arena)
    return CudaDevice(
        SHAPE, home.layout, NUM_SLOTS, MAX_ROWS, pinned, kernels, streams or StandInStreams()
    )


class Layer:
    """One step of one layer: its pairs and their inputs."""

    def __init__(
        self,
        num_tokens: int,
        shape: MoEShape = SHAPE,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        seed: int = 0,
    ) -> None:
        draw = torch.Generator().manual_seed(seed)
        k = shape.num_experts_per_token
        rank = torch.rand(num_tokens, shape.num_experts, generator=draw)
        self.experts = rank.topk(k).indices.sort().values.to(device)
        self.weights = torch.rand(num_tokens, k, generator=draw).to(device)
        self.x = torch.randn(num_tokens, shape.hidden_size, generator=draw).to(device, dtype)
        self.rows = ExpertRows(REFERENCE.sort_pairs(self.experts, shape.num_experts))
        self.buffers = ExpertBuffers(
            self.x[self.rows.token_of],
            *self.x.new_empty((2, num_tokens * k, shape.expert_size)),
        )
        self.terms = (torch.empty_like(self.x), torch.empty_like(self.x, dtype=torch.float32))

    def to_host(self, device: CudaDevice) -> Tensor:
        """The host's side of `parts`, filled as the runtime does; also makes `rows` known."""
        x, experts = device.to_host(self.x, self.experts)
        rows = ExpertRows(REFERENCE.sort_pairs(experts, len(self.rows.counts)))
        self.rows.learn(rows.counts.numpy())
        host_parts = device.host_parts(self.buffers.parts)
        torch.index_select(x, 0, rows.token_of, out=host_parts)
        return host_parts

    def on_host(self, expert: int, home: HostExperts, parts: Tensor) -> None:
        """One expert's products on the host, in place."""
        pairs = self.rows.pairs(expert)
        width = self.buffers.gate.shape[1]
        gate, up = torch.empty((2, pairs.stop - pairs.start, width), dtype=parts.dtype)
        REFERENCE.gated_mlp(parts[pairs], home.weights(0, expert), gate, up, parts[pairs])

    def expected(self, home: HostExperts) -> Tensor:
        """Return the expected `parts`."""
        parts = self.x.cpu()[self.rows.token_of.cpu()]
        for expert in range(len(self.rows.counts)):
            self.on_host(expert, home, parts)
        return parts


def group(pairs: dict[int, int]) -> ExpertGroup:
    """`pairs`: expert to slot, experts ascending."""
    experts, slots = list(pairs), list(pairs.values())
    return ExpertGroup(0, np.array(experts, np.int64), np.array(slots, np.int64))


def triton_groups(monkeypatch: pytest.MonkeyPatch) -> list[ExpertGroup]:
    """The groups of experts that Triton's kernels compute from now on."""
    groups: list[ExpertGroup] = []
    run = cuda.TritonExperts.run

    def noted(experts: Any, group: ExpertGroup, *rest: Any) -> Any:
        groups.append(group)
        return run(experts, group, *rest)

    monkeypatch.setattr(cuda.TritonExperts, "run", noted)
    return groups


def is_close(found: Tensor, wanted: Tensor, tolerance: float = 2e-6) -> bool:
    largest_error = (found.cpu().float() - wanted.float()).abs().max().item()
    return largest_error <= tolerance * wanted.abs().max().item()


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize(
    ("stored", "num_tokens"), [("", 1), ("", 3), ("", 37), *((name, 9) for name in NAMES)]
)
def test_a_layer_shared_with_the_host(
    kernels: str, stored: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Residents first, then one that arrives into a slot that was in use, then the host's."""
    home, layer = HostExperts(layout_of(SHAPE, torch.float32, stored)), Layer(num_tokens)
    wanted = layer.expected(home)
    by_triton = triton_groups(monkeypatch)
    device = make_device(home, kernels=kernels)
    host_parts = layer.to_host(device)
    for expert in (1, 3):
        layer.on_host(expert, home, host_parts)
    arrived = [device.copy(home.image(e), slot, None) for e, slot in ((0, 3), (4, 1), (5, 0))]
    used = device.run(group({0: 3, 4: 1, 5: 0}), layer.rows, layer.buffers, arrived[-1])
    arrived.append(device.copy(home.image(2), 3, used))
    device.run(group({2: 3}), layer.rows, layer.buffers, arrived[-1])
    device.from_host(host_parts, layer.rows, np.array([1, 3]), layer.buffers.parts)
    device.join()
    assert is_close(layer.buffers.parts, wanted)
    assert len(by_triton) == (2 if kernels == "auto" else 0)
    device.close()


def test_a_fully_resident_layer_needs_no_counts_on_the_host() -> None:
    home, layer = (
        HostExperts(num_experts=NUM_SLOTS),
        Layer(9, SHAPE._replace(num_experts=NUM_SLOTS)),
    )
    wanted = Layer(9, SHAPE._replace(num_experts=NUM_SLOTS)).expected(home)
    shape = SHAPE._replace(num_experts=NUM_SLOTS)
    pinned = PinnedMemory(StandInCudart())
    device = CudaDevice(shape, LAYOUT, NUM_SLOTS, MAX_ROWS, pinned, "auto", StandInStreams())
    for expert in range(NUM_SLOTS):
        device.copy(home.image(expert), expert, None)
    device.run(group({e: e for e in range(NUM_SLOTS)}), layer.rows, layer.buffers, None)
    assert not layer.rows.is_known
    assert is_close(layer.buffers.parts, wanted)


def test_streams_wait_for_events_and_the_caller_for_neither() -> None:
    home, layer, streams = HostExperts(), Layer(3), StandInStreams()
    device = make_device(home, streams)
    [first] = streams.copies.waited_for  # what was queued when the slots' memory was handed out
    assert first is streams.current.recorded[0]
    never = CudaEvent(StandInMark())
    never.recorded.has_ended = False
    arrival = device.copy(home.image(0), 0, never)
    assert streams.copies.waited_for == [first, never.recorded]
    assert isinstance(arrival, CudaEvent) and arrival.recorded is streams.copies.recorded[-1]
    use = device.run(group({0: 0}), layer.rows, layer.buffers, arrival)
    assert streams.current.waited_for == [arrival.recorded]
    assert isinstance(use, CudaEvent) and use.recorded is streams.current.recorded[-1]


def test_an_event_of_another_device_is_waited_for_by_the_caller() -> None:
    class Other:
        num_waits = 0

        def is_done(self) -> bool:
            return False

        def wait(self, limit_s: float = 1.0) -> None:
            self.num_waits += 1

    home, other = HostExperts(), Other()
    make_device(home).copy(home.image(0), 0, other)
    assert other.num_waits == 1


def test_a_wait_that_never_ends_becomes_an_error() -> None:
    event = CudaEvent(StandInMark())
    event.wait(0.0)
    event.recorded.has_ended = False
    assert not event.is_done()
    with pytest.raises(DeviceError, match=r"0\.01 s"):
        event.wait(0.01)


def test_a_failure_of_the_gpu_is_reported_where_it_is_waited_for_and_ends_a_drain() -> None:
    home, streams = HostExperts(), StandInStreams()
    device = make_device(home, streams)
    event = device.copy(home.image(0), 0, None)
    streams.copies.recorded[-1].failure = RuntimeError("illegal memory access")
    assert event.is_done()
    with pytest.raises(DeviceError, match="illegal memory access"):
        event.wait()
    record = streams.copies.record_event

    def failing() -> StandInMark:
        mark = record()
        mark.failure = RuntimeError("illegal memory access")
        return mark

    streams.copies.record_event = failing
    device.drain()
    device.close()


def test_what_fails_while_queueing_is_a_device_error() -> None:
    home = HostExperts()
    device, layer = make_device(home), Layer(3)
    with pytest.raises(DeviceError, match="fetching an expert"):
        device.copy(home.image(0)[:100], 0, None)
    too_many = Layer(MAX_ROWS + 1)
    with pytest.raises(DeviceError, match="to the host"):
        too_many.to_host(device)
    with pytest.raises(InternalError, match="82 pairs"):
        device.run(group({0: 0}), too_many.rows, too_many.buffers, None)
    layer.to_host(device)  # goes on


@pytest.mark.parametrize("piece_bytes", [100, 4096, 1 << 20])
def test_pageable_memory_goes_through_the_ring(
    piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "PIECE_BYTES", piece_bytes)
    home, layer, streams = HostExperts(), Layer(20), StandInStreams()
    wanted = layer.expected(home)
    device = make_device(home, streams, is_pinned=False)
    before = streams.pinned_bytes
    device.copy(home.image(0), 0, None)
    ring_bytes = streams.pinned_bytes - before
    assert ring_bytes > 0 and ring_bytes % min(piece_bytes, LAYOUT.num_bytes) == 0
    for expert in range(1, NUM_SLOTS):
        device.copy(home.image(expert), expert, None)
    assert streams.pinned_bytes == before + ring_bytes <= pinned_bytes(SHAPE, LAYOUT, MAX_ROWS)
    layer.to_host(device)
    device.run(group({e: e for e in range(NUM_SLOTS)}), layer.rows, layer.buffers, None)
    rest = layer.buffers.parts.clone()
    for expert in range(NUM_SLOTS, SHAPE.num_experts):
        layer.on_host(expert, home, rest)
    assert is_close(rest, wanted)


def test_a_ring_is_not_written_before_its_last_use_has_ended() -> None:
    streams = StandInStreams()
    ring = cuda.PinnedRing(streams, (2, 8), torch.int32)
    rows = []
    for _ in range(2):
        rows.append(ring.take().tensor.data_ptr())
        ring.used(CudaEvent(streams.current.record_event()))
    assert len(set(rows)) == 2
    streams.current.recorded[0].failure = RuntimeError("seen")
    with pytest.raises(DeviceError, match="seen"):
        ring.take()


def test_the_calling_thread_may_run_ahead_of_many_launches() -> None:
    home, layer, streams = HostExperts(), Layer(2), StandInStreams()
    device = make_device(home, streams)
    layer.to_host(device)
    for _ in range(200):
        device.run(group({0: 0}), layer.rows, layer.buffers, None)
    assert streams.pinned_bytes <= pinned_bytes(SHAPE, LAYOUT, MAX_ROWS)


def test_too_little_pinned_memory_is_a_plan_error() -> None:
    streams = StandInStreams()
    streams.refuses_pinned = True
    with pytest.raises(PlanError, match="KiB of pinned host memory"):
        make_device(HostExperts(), streams)


def check_one_by_one(home: HostExperts, why: str) -> None:
    """Experts are computed without Triton, and it is said why."""
    layer = Layer(12)
    wanted = layer.expected(home)
    with pytest.warns(UserWarning, match=f"one by one.*{why}"):
        device = make_device(home)
    layer.to_host(device)
    for expert in range(SHAPE.num_experts):
        used = device.copy(home.image(expert), expert % 2, None)
        device.run(group({expert: expert % 2}), layer.rows, layer.buffers, used)
    assert is_close(layer.buffers.parts, wanted)


def test_formats_without_a_triton_kernel_say_so() -> None:
    """Of gate and up both are in one tile."""
    q8, q4 = formats()["q8"], formats()["q4"]
    layout = SlotLayout.of(SHAPE, torch.float32, kept=[(q8, q4, q8)])
    check_one_by_one(HostExperts(layout), "float32 from q8, q4")


@pytest.mark.parametrize("kernel", ["plan_tiles", "gated_mlps", "place_rows"])
def test_kernels_that_cannot_run_here_are_left_alone_and_it_is_said(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's errors are no RuntimeErrors."""

    def refuse(*_: object) -> None:
        raise PermissionError("the cache folder cannot be written")

    monkeypatch.setattr(triton_experts, kernel, refuse)
    check_one_by_one(HostExperts(), "cache folder")


def test_a_triton_that_cannot_compile_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(triton_routing, "sort_pairs", refuse)
    choice.why_no_triton.cache_clear()
    try:
        assert "C compiler" in (choice.why_no_triton(torch.device("cpu")) or "")
        with pytest.warns(UserWarning, match="one by one.*C compiler"):
            make_device(HostExperts())
    finally:
        choice.why_no_triton.cache_clear()


def test_what_a_closed_device_had_is_given_back() -> None:
    streams = StandInStreams()
    device = make_device(HostExperts(), streams)
    assert streams.num_released == 0
    device.close()
    device.close()
    assert streams.num_released == 1


def test_an_arena_is_pinned_at_its_exact_size() -> None:
    cudart = StandInCudart()
    pinned = PinnedMemory(cudart)
    first, second = Arena(7_001), Arena(3_000)
    assert pinned.register(first) and pinned.register(Arena(0))
    assert cudart.registered == {first.bytes.data_ptr(): 7_001}
    assert pinned.holds(first.bytes[5:]) and not pinned.holds(second.bytes)
    pinned.close()
    assert not cudart.registered and not pinned.holds(first.bytes)


def test_what_is_lent_is_pinned_for_a_while() -> None:
    cudart = StandInCudart()
    pinned, kept = PinnedMemory(cudart), Arena(100)
    pinned.register(kept)
    with pinned.lent():
        lent = Arena(200)
        pinned.register(lent)
        assert pinned.holds(lent.bytes)
    assert cudart.registered == {kept.bytes.data_ptr(): 100}
    assert pinned.holds(kept.bytes) and not pinned.holds(lent.bytes)
    pinned.close()


def test_the_first_bytes_of_a_region_are_one_pinned_range() -> None:
    cudart = StandInCudart()
    pinned, region, other = PinnedMemory(cudart), Arena(8192), Arena(100)
    start = region.bytes.data_ptr()
    pinned.register(other)
    others = {other.bytes.data_ptr(): 100}
    for num_bytes in (8192, 4096, 6000, 8192):
        assert pinned.keep_first(region, num_bytes)
        assert cudart.registered == {**others, start: num_bytes}
        assert pinned.holds(region.bytes[:num_bytes])
        assert not pinned.holds(region.bytes[num_bytes - 1 :]) or num_bytes == 8192
    assert pinned.keep_first(region, 0) and cudart.registered == others
    pinned.keep_first(region, 4096)
    pinned.close()
    assert not cudart.registered


def test_memory_is_unpinned_before_it_goes_though_it_was_not_closed() -> None:
    cudart, arena = StandInCudart(), Arena(100)
    pinned = PinnedMemory(cudart)
    pinned.register(arena)
    assert cudart.registered
    del pinned
    assert not cudart.registered


def test_a_refusal_of_the_system_is_said() -> None:
    pinned = PinnedMemory(StandInCudart(code=2))
    arena = Arena(100)
    with pytest.warns(UserWarning, match="CUDA error 2"):
        assert not pinned.register(arena)
    assert not pinned.holds(arena.bytes)


# On a GPU.

GPU_SHAPE = MoEShape(1, num_experts=64, num_experts_per_token=6, hidden_size=512, expert_size=256)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
SHARED = [("", *each) for each in itertools.product(TOLERANCE, (True, False))]
SHARED += [(name, torch.bfloat16, True) for name in NAMES]


@contextmanager
def gpu_device(
    home: HostExperts, num_slots: int, kernels: str = "auto", is_pinned: bool = True
) -> Iterator[CudaDevice]:
    pinned = PinnedMemory()
    if is_pinned:
        assert pinned.register(home.arena)
    device = CudaDevice(GPU_SHAPE, home.layout, num_slots, 256, pinned, kernels)
    yield device
    device.close()
    pinned.close()


def share_a_layer(device: CudaDevice, home: HostExperts, layer: Layer, seed: int) -> None:
    """A third of the experts on the host, the rest fetched in waves through too few slots."""
    host_parts = layer.to_host(device)
    order = np.random.default_rng(seed).permutation(GPU_SHAPE.num_experts)
    on_host, fetched = np.sort(order[:20]), order[20:]
    for expert in on_host.tolist():
        layer.on_host(expert, home, host_parts)
    last_use: list[Any] = [None] * device.num_slots
    half = device.num_slots // 2
    for i in range(0, len(fetched), half):
        first_slot = i // half % 2 * half
        slots = {int(e): first_slot + j for j, e in enumerate(fetched[i : i + half])}
        slots = dict(sorted(slots.items()))
        events = [device.copy(home.image(e), s, last_use[s]) for e, s in slots.items()]
        used = device.run(group(slots), layer.rows, layer.buffers, events[-1])
        for slot in slots.values():
            last_use[slot] = used
    device.from_host(host_parts, layer.rows, on_host, layer.buffers.parts)
    device.join()


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize(("stored", "dtype", "is_pinned"), SHARED, ids=str)
def test_layers_shared_with_the_host_on_a_gpu(
    stored: str, dtype: torch.dtype, is_pinned: bool, kernels: str
) -> None:
    """Without Triton, too: torch unpacks there."""
    home = HostExperts(layout_of(GPU_SHAPE, dtype, stored), GPU_SHAPE.num_experts)
    with gpu_device(home, 8, kernels, is_pinned) as device:
        for seed, num_tokens in enumerate((1, 32, 7, 256, 32)):
            layer = Layer(num_tokens, GPU_SHAPE, dtype, device.torch_device, seed)
            share_a_layer(device, home, layer, seed)
            assert is_close(layer.buffers.parts, layer.expected(home), TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("stored", ["", *NAMES])
def test_a_gpu_runs_the_triton_kernels(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fallback gives the same results, and would hide that they do not work."""
    home = HostExperts(layout_of(GPU_SHAPE, torch.bfloat16, stored), GPU_SHAPE.num_experts)
    with gpu_device(home, 8) as device:
        assert choice.why_no_triton(device.torch_device) is None
        by_triton = triton_groups(monkeypatch)
        layer = Layer(7, GPU_SHAPE, torch.bfloat16, device.torch_device)
        share_a_layer(device, home, layer, 0)
        assert by_triton


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_resident_layer_neither_waits_nor_allocates_on_a_gpu() -> None:
    home = HostExperts(SlotLayout.of(GPU_SHAPE, torch.bfloat16), GPU_SHAPE.num_experts)
    everyone = group({e: e for e in range(GPU_SHAPE.num_experts)})
    with gpu_device(home, GPU_SHAPE.num_experts) as device:
        for expert in range(GPU_SHAPE.num_experts):
            device.copy(home.image(expert), expert, None).wait()
        layer = Layer(32, GPU_SHAPE, torch.bfloat16, device.torch_device)
        out, kernels = torch.empty_like(layer.x, dtype=torch.float32), device.kernels

        def step() -> None:
            rows = ExpertRows(kernels.sort_pairs(layer.experts, GPU_SHAPE.num_experts))
            torch.index_select(layer.x, 0, rows.token_of, out=layer.buffers.parts)
            device.run(everyone, rows, layer.buffers, None)
            kernels.combine(layer.buffers.parts, rows.part_of, layer.weights, *layer.terms, out)

        step()
        wanted = out.clone()
        reserved = torch.cuda.memory_reserved()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(5):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_reserved() == reserved
        assert torch.equal(out, wanted)


@pytest.mark.gpu
def test_a_copy_waits_for_the_last_use_of_its_slot_on_a_gpu() -> None:
    home = HostExperts(SlotLayout.of(GPU_SHAPE, torch.bfloat16), GPU_SHAPE.num_experts)
    with gpu_device(home, 1) as device:
        layer = Layer(256, GPU_SHAPE, torch.bfloat16, device.torch_device)
        wanted = layer.expected(home)
        layer.to_host(device)
        used = None
        for expert in range(GPU_SHAPE.num_experts):
            torch.cuda._sleep(200_000)  # the computation lags behind the link
            arrived = device.copy(home.image(expert), 0, used)
            used = device.run(group({expert: 0}), layer.rows, layer.buffers, arrived)
        assert is_close(layer.buffers.parts, wanted, TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
def test_slots_may_lie_beyond_two_to_the_31_elements_on_a_gpu() -> None:
    home = HostExperts(SlotLayout.of(GPU_SHAPE, torch.bfloat16), GPU_SHAPE.num_experts)
    num_slots = 2**31 * torch.bfloat16.itemsize // home.layout.num_bytes + 8  # 4 GiB
    with gpu_device(home, num_slots) as device:
        layer = Layer(32, GPU_SHAPE, torch.bfloat16, device.torch_device)
        layer.to_host(device)
        for expert in range(GPU_SHAPE.num_experts):
            slot = num_slots - 1 - expert % 8
            device.copy(home.image(expert), slot, None).wait()
            device.run(group({expert: slot}), layer.rows, layer.buffers, None).wait()
        assert is_close(layer.buffers.parts, layer.expected(home), TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
def test_a_refused_registration_leaves_cuda_usable() -> None:
    arena, pinned = Arena(1 << 20), PinnedMemory()
    assert pinned.register(arena)
    with pytest.warns(UserWarning, match="CUDA error"):
        assert not pinned.register(arena)
    assert torch.ones(3, device="cuda").sum().item() == 3
    torch.cuda.synchronize()
    pinned.close()


@pytest.mark.gpu
def test_more_slots_than_memory_are_refused_on_a_gpu() -> None:
    layout = SlotLayout.of(GPU_SHAPE, torch.bfloat16)
    num_slots = 2 * torch.cuda.mem_get_info()[1] // layout.num_bytes
    with pytest.raises(PlanError, match="GPU memory"):
        CudaDevice(GPU_SHAPE, layout, num_slots, 256, PinnedMemory())
    assert CudaStreams().torch_device.type == "cuda"
