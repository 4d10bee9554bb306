"""What every device promises, against the host's own products.

A device that is added gets a row in `DEVICES`. Faults are injected as a caller could cause them, by
what is queued.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import NamedTuple

import numpy as np
import pytest
import torch
from cuda_stand_ins import StandInCudart, StandInStreams
from hypothesis import given
from hypothesis import strategies as st
from stranger_parts import devices as stranger
from torch import Tensor
from whole import no_more_threads

from lowtide.core import Curve, MoEShape
from lowtide.devices.cuda import CudaDevice
from lowtide.devices.kind import DeviceRequest
from lowtide.errors import DeviceError
from lowtide.experts.device import Device, ExpertGroup
from lowtide.experts.layout import SlotLayout
from lowtide.experts.rows import ExpertBuffers, ExpertRows
from lowtide.experts.slots import ExpertSlots
from lowtide.kernels.reference import REFERENCE
from lowtide.lab.emulated.device import EmulatedDevice
from lowtide.lab.emulated.speeds import EmulatedSpeeds
from lowtide.memory.arena import Arena
from lowtide.memory.pinned import PinnedMemory
from lowtide.threads.event import Event

SHAPE = MoEShape(1, num_experts=5, num_experts_per_token=2, hidden_size=32, expert_size=24)
LAYOUT = SlotLayout.of(SHAPE, torch.float32)
NUM_SLOTS = 3
MAX_ROWS = 40


class Row(NamedTuple):
    """A device: how one is opened with its slots, and how it fails."""

    open: Callable[[SlotLayout, Arena], AbstractContextManager[Device]]
    error: type[Exception] = DeviceError
    tolerance: float = 0.0  # 0: the host's bits
    checks_sizes: bool = True  # of what is copied; else nothing that a caller does fails


def emulated(link_s: float) -> Row:
    speeds = EmulatedSpeeds(1e15, link_s, 1.0, Curve([(1, 0.0)]))

    @contextmanager
    def opened(layout: SlotLayout, home: Arena) -> Iterator[Device]:
        arena = Arena(NUM_SLOTS * layout.num_bytes)
        with closing(EmulatedDevice(arena, layout, NUM_SLOTS, speeds)) as device:
            yield device

    return Row(opened)


def cuda(is_pinned: bool) -> Row:
    """On streams that do their work at once; on a GPU: test_cuda_device.py."""

    @contextmanager
    def opened(layout: SlotLayout, home: Arena) -> Iterator[Device]:
        pinned = PinnedMemory(StandInCudart())
        if is_pinned:
            pinned.register(home)
        made = CudaDevice(SHAPE, layout, NUM_SLOTS, MAX_ROWS, pinned, "reference", StandInStreams())
        with closing(made) as device:
            yield device

    return Row(opened, tolerance=2e-6, checks_sizes=is_pinned)


@contextmanager
def second_host(layout: SlotLayout, home: Arena) -> Iterator[Device]:
    request = DeviceRequest(SHAPE, layout, REFERENCE, NUM_SLOTS, 1, 0, {})
    opened = stranger.SECOND_HOST.open(request)
    yield opened.device
    opened.close()


DEVICES: dict[str, Row] = {
    "emulated": emulated(0.0),
    "emulated, slow link": emulated(2e-4),
    "cuda": cuda(is_pinned=True),
    "cuda, pageable": cuda(is_pinned=False),
    "second-host": Row(second_host, RuntimeError),
}


class Home(ExpertSlots):
    """All experts in host memory, expert e in slot e."""

    def __init__(self, layout: SlotLayout = LAYOUT) -> None:
        self.arena = Arena(SHAPE.num_experts * layout.num_bytes)
        super().__init__(self.arena, layout)
        self.arena.bytes.view(layout.dtype).normal_(generator=torch.Generator().manual_seed(0))


class Layer:
    """A step of a layer: its routing, and its pairs' inputs in `buffers.parts`."""

    def __init__(self, num_tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        draw = torch.Generator().manual_seed(seed)
        order = torch.rand(num_tokens, SHAPE.num_experts, generator=draw).argsort(1)
        self.experts = order[:, : SHAPE.num_experts_per_token].sort(1).values
        self.rows = ExpertRows(REFERENCE.sort_pairs(self.experts, SHAPE.num_experts))
        self.x = torch.randn(num_tokens, SHAPE.hidden_size, generator=draw).to(dtype)
        num_pairs = num_tokens * SHAPE.num_experts_per_token
        gate, up = (torch.empty(num_pairs, SHAPE.expert_size, dtype=dtype) for _ in range(2))
        self.buffers = ExpertBuffers(self.x[self.rows.token_of], gate, up)

    def compute(self, expert: int, weights: ExpertSlots, slot: int, parts: Tensor) -> None:
        """An expert's products as the runtime without a device does them, in place."""
        pairs = self.rows.pairs(expert)
        gate, up = torch.empty(2, pairs.stop - pairs.start, SHAPE.expert_size, dtype=parts.dtype)
        REFERENCE.gated_mlp(parts[pairs], weights.weights(0, slot), gate, up, parts[pairs])


def group(pairs: dict[int, int]) -> ExpertGroup:
    """`pairs`: expert to slot."""
    experts = sorted(pairs)
    slots = [pairs[expert] for expert in experts]
    return ExpertGroup(0, np.array(experts, np.int64), np.array(slots, np.int64))


def is_same(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    if not tolerance:
        return torch.equal(found, wanted)
    largest_error = (found.float() - wanted.float()).abs().max().item()
    return largest_error <= tolerance * wanted.abs().max().item()


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    with no_more_threads():
        yield


every_device = pytest.mark.parametrize("row", DEVICES.values(), ids=list(DEVICES))


@pytest.mark.invariant
@every_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 6, 37])
def test_a_layer_shared_with_the_host_is_the_host_s(
    row: Row, dtype: torch.dtype, num_tokens: int
) -> None:
    """Some experts from slots in two groups, the others on the host, all at once."""
    home = Home(SlotLayout.of(SHAPE, dtype))
    layer, wanted = Layer(num_tokens, dtype=dtype), Layer(num_tokens, dtype=dtype)
    on_host = [0, 2, 3]
    with row.open(home.layout, home.arena) as device:
        x, experts = device.to_host(layer.x, layer.experts)
        assert torch.equal(x, layer.x) and torch.equal(experts, layer.experts)
        arrived = [device.copy(home.image(e), slot, None) for e, slot in ((4, 0), (1, 2))]
        host_parts = device.host_parts(layer.buffers.parts)
        for pairs in map(layer.rows.pairs, on_host):
            host_parts[pairs] = x[layer.rows.token_of[pairs]]
        device.run(group({4: 0}), layer.rows, layer.buffers, arrived[0])
        device.run(group({1: 2}), layer.rows, layer.buffers, arrived[1])
        for expert in on_host:
            device.host_work([1], lambda e=expert: layer.compute(e, home, e, host_parts))()
        device.from_host(host_parts, layer.rows, np.array(on_host), layer.buffers.parts)
        device.join()
    for expert in range(SHAPE.num_experts):
        wanted.compute(expert, home, expert, wanted.buffers.parts)
    tolerance = row.tolerance and max(row.tolerance, torch.finfo(dtype).eps)
    assert is_same(layer.buffers.parts, wanted.buffers.parts, tolerance)


@every_device
def test_an_empty_group_and_experts_without_tokens_are_nothing_to_do(row: Row) -> None:
    home, layer = Home(), Layer(1)
    absent = next(e for e in range(SHAPE.num_experts) if layer.rows.pairs(e) == slice(0, 0))
    before = layer.buffers.parts.clone()
    with row.open(LAYOUT, home.arena) as device:
        for experts in ({absent: 0}, {}):
            device.run(group(experts), layer.rows, layer.buffers, None)
        device.join()
    assert torch.equal(layer.buffers.parts, before)


@every_device
def test_a_copy_and_a_run_begin_after_what_they_wait_for(row: Row) -> None:
    home, layer, wanted = Home(), Layer(6), Layer(6)
    wanted.compute(2, home, 2, wanted.buffers.parts)
    with row.open(LAYOUT, home.arena) as device:
        for begin in (
            lambda after: device.copy(home.image(2), 1, after),
            lambda after: device.run(group({2: 1}), layer.rows, layer.buffers, after),
        ):
            signal = Signal()
            later = threading.Timer(0.02, signal.set)
            later.start()
            begin(signal).wait()
            assert signal.is_set()
            later.join()
        device.join()
    assert is_same(layer.buffers.parts, wanted.buffers.parts, row.tolerance)


class Signal(threading.Event):
    """An event that is no device's own."""

    is_done = threading.Event.is_set


@pytest.mark.parametrize(
    "row",
    [row for row in DEVICES.values() if row.checks_sizes],
    ids=[name for name, row in DEVICES.items() if row.checks_sizes],
)
def test_a_copy_that_fails_is_an_error_and_the_device_goes_on(row: Row) -> None:
    home, layer, wanted = Home(), Layer(6), Layer(6)
    wanted.compute(1, home, 1, wanted.buffers.parts)
    with row.open(LAYOUT, home.arena) as device:
        with pytest.raises(row.error):
            device.copy(home.image(0)[:100], 0, None).wait()
        device.drain()
        arrived = device.copy(home.image(1), 1, None)
        device.run(group({1: 1}), layer.rows, layer.buffers, arrived)
        device.join()
    assert is_same(layer.buffers.parts, wanted.buffers.parts, row.tolerance)


@every_device
def test_predicted_counts_are_there_after_the_next_synchronisation(row: Row) -> None:
    home, layer = Home(), Layer(6)
    predicted = torch.arange(SHAPE.num_experts)
    with row.open(LAYOUT, home.arena) as device:
        staged = device.stage(predicted)
        device.to_host(layer.x, layer.experts)
        assert torch.equal(staged, predicted)


programmes = st.lists(
    st.one_of(
        st.tuples(st.integers(0, SHAPE.num_experts - 1), st.integers(0, NUM_SLOTS - 1)),
        st.dictionaries(
            st.integers(0, SHAPE.num_experts - 1),
            st.integers(0, NUM_SLOTS - 1),
            min_size=1,
            max_size=NUM_SLOTS,
        ),
    ),
    max_size=20,
)


@every_device
@given(programme=programmes)
def test_any_programme_ends_as_if_done_one_by_one(
    row: Row, programme: list[tuple[int, int] | dict[int, int]]
) -> None:
    """Copies (expert, slot) and runs (expert: slot it is computed from), waiting as they must."""
    home = Home()
    last_use: list[Event | None] = [None] * NUM_SLOTS
    last_copy: Event | None = None
    first = [(0, slot) for slot in range(NUM_SLOTS)]
    steps = [*first, *programme]
    got, wanted = ([Layer(3, i) for i in range(len(steps))] for _ in range(2))
    slots = ExpertSlots(Arena(NUM_SLOTS * LAYOUT.num_bytes), LAYOUT)
    with row.open(LAYOUT, home.arena) as device:
        for i, item in enumerate(steps):
            if isinstance(item, tuple):
                expert, slot = item
                last_copy = device.copy(home.image(expert), slot, last_use[slot])
                slots.image(slot).copy_(home.image(expert))
                continue
            use = device.run(group(item), got[i].rows, got[i].buffers, last_copy)
            for expert, slot in item.items():
                last_use[slot] = use
                wanted[i].compute(expert, slots, slot, wanted[i].buffers.parts)
        device.join()
    for done, right in zip(got, wanted, strict=True):
        assert is_same(done.buffers.parts, right.buffers.parts, row.tolerance)
