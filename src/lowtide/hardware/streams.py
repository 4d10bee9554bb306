"""The work that costs are made of, in steady streams, each sample timed per expert or per layer.

Everything goes through the mechanisms that a model runs on: the compute threads, a device's two
streams, the file reader; and over weights that are in no cache (`cold_weights.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import cycle, islice
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from lowtide.core import MoEShape, align_up
from lowtide.experts.batched_experts import BatchedExperts, cores_beside_device
from lowtide.experts.device import Device, ExpertGroup
from lowtide.experts.rows import ExpertBuffers, ExpertRows
from lowtide.experts.transfer import DiskTransfer, ticket_result
from lowtide.hardware.cold_weights import ColdWeights, cold_bytes
from lowtide.kernels.reference import REFERENCE, Kernels
from lowtide.reading.file_reader import FileReader, Ticket
from lowtide.schemas import ExpertTable
from lowtide.threads.event import Event
from lowtide.threads.executor import Executor, Work

MAX_TOKENS = 256
"""Most tokens of one expert that are measured; beyond, time grows as at the end."""

STREAM_BYTES = 64 << 20
"""Approximate weights of one sample; a few experts if they are larger."""

STREAM_ROWS = 4096
"""Most rows of one sample: those of a pass of 512 tokens with 8 experts each."""

_MAX_EXPERTS = 64  # of one sample
_MAX_LAYERS = 64  # of one sample
_NUM_PRODUCTS = 4  # that a layer's dense weights are divided into: attention in and out, MLP
# What a layer runs besides its products: about as many as LLaDA2.0, without and with Triton.
_NUM_SMALL_OPERATORS, _NUM_SMALL_KERNELS = 64, 20
_SPLIT_BYTES = 4 << 20  # a smaller dense product is not divided among threads
_MAX_GROUPS = 4  # one after the other over the same pairs, whose values shrink each time


class HostStream:
    """Times experts on the compute threads, executed as in a layer.

    Experts of few tokens run in one call if possible; otherwise threads take whole experts in turn.
    """

    def __init__(
        self,
        shape: MoEShape,
        weights: ColdWeights,
        executor: Executor,
        device: Device | None,
        kernels: Kernels,
    ) -> None:
        """device: the device whose host it is; an emulated one stretches the host's time."""
        self._weights = weights
        self._executor = executor
        self._kernels = kernels
        self._device = device
        num_cores = executor.num_cores if device is None else cores_beside_device(executor)
        self._batched = BatchedExperts.of(weights.slots, kernels, num_cores)
        layout = weights.slots.layout
        per_thread = min(_MAX_EXPERTS, STREAM_BYTES // layout.num_bytes) // executor.num_threads
        self._most_experts = executor.num_threads * max(1, per_thread)
        num_rows = max(STREAM_ROWS, executor.num_threads * MAX_TOKENS)
        num_rows = min(num_rows, self._most_experts * MAX_TOKENS)
        self._x = _random((num_rows, shape.hidden_size), layout.dtype)
        self._out = torch.empty_like(self._x)
        self._gate = torch.empty((num_rows, shape.expert_size), dtype=layout.dtype)
        self._up = torch.empty_like(self._gate)

    def sample(self, num_tokens: int) -> float:
        """Return seconds per expert of `num_tokens` tokens."""
        num_threads = self._executor.num_threads
        num_experts = max(num_threads, min(self._most_experts, STREAM_ROWS // num_tokens))
        works = deque(self._works(num_experts, num_tokens))
        num_threads = min(num_threads, len(works))
        start_s = perf_counter()
        threads = [self._executor.submit(partial(_take_all, works)) for _ in range(num_threads)]
        for thread in threads:
            thread.result()
        return (perf_counter() - start_s) / num_experts

    def _works(self, num_experts: int, num_tokens: int) -> list[Work]:
        batched = self._batched
        if batched is not None and batched.takes_experts(np.array(num_tokens)):
            return [self._shared_work(batched, num_experts, num_tokens)]
        return [self._work(place, num_tokens) for place in range(num_experts)]

    def _work(self, place: int, num_tokens: int) -> Work:
        rows = slice(place * num_tokens, (place + 1) * num_tokens)
        expert = self._weights.slots.weights(self._weights.layer, self._weights.next_slot())
        buffers = (self._gate[rows], self._up[rows], self._out[rows])
        work = partial(self._kernels.gated_mlp, self._x[rows], expert, *buffers)
        return self._beside_device([num_tokens], work)

    def _shared_work(self, batched: BatchedExperts, num_experts: int, num_tokens: int) -> Work:
        """Return all experts as one call."""
        slots = [self._weights.next_slot() for _ in range(num_experts)]
        groups = np.array([(slot, i * num_tokens, num_tokens) for i, slot in enumerate(slots)])
        num_rows = num_experts * num_tokens
        self._out[:num_rows] = self._x[:num_rows]  # outputs replace inputs
        layer = self._weights.layer
        work = partial(batched.run, groups, self._out, self._gate, self._up, layer)
        return self._beside_device([num_tokens] * num_experts, work)

    def _beside_device(self, num_tokens: Sequence[int], work: Work) -> Work:
        return work if self._device is None else self._device.host_work(num_tokens, work)


class DenseStream:
    """The dense weights of a layer as a few products, divided among the compute threads.

    Stands for attention's projections, router and shared expert; the scores over past keys and
    values are not in it.
    """

    def __init__(
        self,
        shape: MoEShape,
        weights: ColdWeights,
        executor: Executor,
        dense_bytes: int,
        kernels: Kernels,
    ) -> None:
        self._executor = executor
        self._multiply = kernels.multiply
        self._elements = weights.arena.bytes.view(weights.slots.layout.dtype)
        self._hidden = shape.hidden_size
        self._next = 0
        dtype = self._elements.dtype
        row_bytes = self._hidden * dtype.itemsize
        most = len(self._elements) // self._hidden // 64 * 64
        self._num_features = min(most, align_up(dense_bytes // row_bytes // _NUM_PRODUCTS, 64))
        is_split = self._num_features * row_bytes >= _SPLIT_BYTES
        num_pieces = executor.num_threads if is_split else 1
        self._piece = align_up(-(-self._num_features // num_pieces), 64)
        self._x = _random((MAX_TOKENS, self._hidden), dtype)
        self._out = torch.empty((MAX_TOKENS, self._num_features), dtype=dtype)

    def sample(self, num_tokens: int) -> float:
        """Seconds per layer of `num_tokens` tokens."""
        products = [self._works(num_tokens) for _ in range(_NUM_PRODUCTS)]
        start_s = perf_counter()
        for works in products:
            self._executor.run(works)
        return perf_counter() - start_s

    def _works(self, num_tokens: int) -> list[Work]:
        num_elements = self._num_features * self._hidden
        if self._next + num_elements > len(self._elements):
            self._next = 0
        weight = self._elements[self._next : self._next + num_elements].view(-1, self._hidden)
        self._next += align_up(num_elements)
        x, out = self._x[:num_tokens], self._out[:num_tokens]
        return [
            partial(self._multiply, x, piece.t(), None, out[:, start : start + len(piece)])
            for start, piece in zip(
                range(0, self._num_features, self._piece),
                torch.split(weight, self._piece),
                strict=True,
            )
        ]


class DeviceDenseStream:
    """Times a layer's dense products and small operators on a device with memory of its own.

    On a fast GPU a layer's time is not due to bytes, but to launching its norms, rotations, scores
    and sums one by one.
    """

    def __init__(
        self,
        shape: MoEShape,
        dtype: torch.dtype,
        torch_device: torch.device,
        dense_bytes: int,
        kernels: Kernels,
    ) -> None:
        """kernels: the device's own; plain ones are more operators, each launched by itself."""
        self._torch_device = torch_device
        is_plain = kernels is REFERENCE
        self._num_small = _NUM_SMALL_OPERATORS if is_plain else _NUM_SMALL_KERNELS
        num_features = max(64, dense_bytes // (shape.hidden_size * dtype.itemsize) // _NUM_PRODUCTS)
        # Small layers stay in a GPU's cache anyway; ten thousand of them would take seconds.
        num_layers = max(2, min(_MAX_LAYERS, -(-cold_bytes() // dense_bytes)))
        shapes = (num_layers * _NUM_PRODUCTS, num_features, shape.hidden_size)
        self._weights = _random(shapes, dtype, torch_device)
        self._x = _random((MAX_TOKENS, shape.hidden_size), dtype, torch_device)
        self._out = torch.empty((MAX_TOKENS, num_features), dtype=dtype, device=torch_device)
        self.sample(1)  # a process's first product also loads the GPU's library of them

    def sample(self, num_tokens: int) -> float:
        """Return seconds per layer of `num_tokens` tokens."""
        x, out = self._x[:num_tokens], self._out[:num_tokens]
        _synchronise(self._torch_device)
        start_s = perf_counter()
        for number, weight in enumerate(self._weights):
            torch.mm(x, weight.t(), out=out)
            if number % _NUM_PRODUCTS == 0:
                for _ in range(self._num_small):
                    x.mul_(1.0)
        _synchronise(self._torch_device)
        return (perf_counter() - start_s) * _NUM_PRODUCTS / len(self._weights)


class DeviceStream:
    """Groups of experts on a device, the copies into its slots, and its synchronisation."""

    def __init__(self, shape: MoEShape, weights: ColdWeights, device: Device) -> None:
        """The device's slots must be free; they are filled."""
        self._shape = shape
        self._device = device
        self._weights = weights
        self._top_k = min(shape.num_experts_per_token, device.num_slots, shape.num_experts)
        self._next_slot = 0
        dtype = weights.slots.layout.dtype
        most_pairs = STREAM_ROWS // 8 * self._top_k
        self._inputs = _random((most_pairs, shape.hidden_size), dtype, device.torch_device)
        sizes = (shape.hidden_size, shape.expert_size, shape.expert_size)
        self._scratch = [
            torch.empty((most_pairs, size), dtype=dtype, device=device.torch_device)
            for size in sizes
        ]
        for event in [self._copy() for _ in range(device.num_slots)]:
            event.wait()

    def sample(self, num_tokens: int) -> float:
        """Seconds per expert of `num_tokens` tokens, in groups as a step has them."""
        group_size = self._group_size(num_tokens)
        rows = self._rows(num_tokens, group_size)
        num_pairs = num_tokens * group_size
        num_groups = max(1, min(_MAX_GROUPS, self._device.num_slots // group_size))
        buffers = self._buffers(num_pairs)
        buffers.parts.copy_(self._inputs[:num_pairs])
        groups = [self._group(group_size) for _ in range(num_groups)]
        self._settle()
        start_s = perf_counter()
        events = [self._device.run(group, rows, buffers, None) for group in groups]
        self._device.join()
        events[-1].wait()
        return (perf_counter() - start_s) / (num_groups * group_size)

    def sample_link(self) -> float:
        """Seconds per expert in a stream of copies."""
        num_copies = max(2, min(_MAX_EXPERTS, STREAM_BYTES // self._weights.slots.layout.num_bytes))
        self._settle()
        start_s = perf_counter()
        events = [self._copy() for _ in range(num_copies)]
        for event in events:
            event.wait()
        return (perf_counter() - start_s) / num_copies

    def sample_sync(self) -> float:
        """Seconds from the queue's end to one token's input and experts in host memory."""
        experts = torch.arange(self._top_k, device=self._device.torch_device)[None]
        self._settle()
        start_s = perf_counter()
        self._device.to_host(self._inputs[:1], experts)
        return perf_counter() - start_s

    def _copy(self) -> Event:
        source = self._weights.slots.image(self._weights.next_slot())
        slot = self._next_slot
        self._next_slot = (slot + 1) % self._device.num_slots
        return self._device.copy(source, slot, None)

    def _group_size(self, num_tokens: int) -> int:
        """A multiple of the experts per token, so that all can have equally many tokens."""
        most = min(self._device.num_slots, self._shape.num_experts, 4 * self._top_k)
        most = min(most, len(self._inputs) // num_tokens)
        return max(1, most // self._top_k) * self._top_k

    def _rows(self, num_tokens: int, group_size: int) -> ExpertRows:
        pairs = torch.arange(num_tokens * group_size, device=self._device.torch_device)
        experts = (pairs % group_size).view(-1, self._top_k)
        rows = ExpertRows(self._device.kernels.sort_pairs(experts, self._shape.num_experts))
        rows.pairs(0)  # makes the bounds known: the synchronisation is timed by itself
        return rows

    def _group(self, size: int) -> ExpertGroup:
        slots = (self._next_slot + np.arange(size)) % self._device.num_slots
        self._next_slot = int(slots[-1] + 1) % self._device.num_slots
        return ExpertGroup(self._weights.layer, np.arange(size), slots)

    def _buffers(self, num_pairs: int) -> ExpertBuffers:
        return ExpertBuffers(*(buffer[:num_pairs] for buffer in self._scratch))

    def _settle(self) -> None:
        self._device.drain()
        _synchronise(self._device.torch_device)


class DiskStream:
    """Times experts read from a checkpoint into host slots, with the reader's concurrency."""

    def __init__(self, reader: FileReader, table: ExpertTable, weights: ColdWeights) -> None:
        """Overwrites `weights`."""
        layout = weights.slots.layout
        self._transfer = DiskTransfer(reader, table, weights.slots)
        self._num_slots = min(weights.num_slots, 12)
        self._num_experts = max(4, min(_MAX_EXPERTS, STREAM_BYTES // layout.num_bytes))
        num_layers, num_experts, _ = table.files.shape
        order = np.random.default_rng(0).permutation(num_layers * num_experts)
        self._order = cycle(divmod(place, num_experts) for place in order.tolist())

    def sample(self) -> float:
        """Return seconds per expert, read in random order."""
        tickets: deque[Ticket] = deque()
        start_s = perf_counter()
        for place, (layer, expert) in enumerate(islice(self._order, self._num_experts)):
            if len(tickets) == self._num_slots:
                ticket_result(tickets.popleft())
            tickets.append(self._transfer.start(layer, expert, place % self._num_slots))
        for ticket in tickets:
            ticket_result(ticket)
        return (perf_counter() - start_s) / self._num_experts


def _take_all(works: deque[Work]) -> None:
    while True:
        try:
            work = works.popleft()
        except IndexError:  # another thread took the last one
            return
        work()


def _random(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    values = torch.empty(shape, dtype=dtype, device=device)
    scale = shape[-1] ** -0.5 if len(shape) == 3 else 1.0
    return values.normal_(std=scale)


def _synchronise(torch_device: torch.device) -> None:
    if torch_device.type == "cuda":
        torch.cuda.synchronize(torch_device)
