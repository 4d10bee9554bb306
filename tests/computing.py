"""Pieces that layers compute with in tests."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtide.compute import Compute
from lowtide.experts.batched_experts import BatchedExperts
from lowtide.experts.rows import ExpertRows, Routing
from lowtide.kernels.cpu.library import struct
from lowtide.kernels.cpu.weight_calls import CompiledExperts
from lowtide.kernels.operands import SlotPlaces
from lowtide.kernels.reference import REFERENCE, Kernels
from lowtide.layers.attention import CachedAttention
from lowtide.layers.batch import Segment
from lowtide.layers.sdpa import Scores
from lowtide.memory.arena import Arena
from lowtide.memory.kv_cache import KVCache
from lowtide.memory.planner import Graph
from lowtide.memory.workspace import Buffers, Workspace
from lowtide.threads.executor import Executor, InlineExecutor, Work


def randn(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(device, dtype)


def on_this_thread(
    workspace: Buffers | None = None,
    kernels: Kernels = REFERENCE,
    executor: Executor | None = None,
) -> Compute:
    """Plain torch in 64 MiB, unless something else is given."""
    if workspace is None:
        workspace = Workspace(Arena(64 << 20).bytes)
    return Compute(executor or InlineExecutor(), kernels, workspace)


def peak_bytes(graph: Graph) -> int:
    """Return the most bytes alive at once, with those that libraries hold at the same time."""
    return max(
        graph.alive_bytes(moment) + sum(output.num_bytes for output in moment.library)
        for moment in graph.moments
    )


def summed_at_once(
    batched: BatchedExperts, x: Tensor, routing: Routing, width: int, layer: int, num_threads: int
) -> Tensor:
    """Run all experts of some tokens and sum them, in one call each and in one call for both.

    Expert e is in slot e.
    """
    shape = (routing.experts.numel(), x.shape[1])
    num_experts = int(routing.experts.max()) + 1
    rows = ExpertRows(REFERENCE.sort_pairs(routing.experts, num_experts))
    parts, scratch = x[rows.token_of], torch.empty(2, shape[0], width, dtype=x.dtype)
    used = np.array(rows.demanded)
    batched.run(rows.groups(used, used), parts, *scratch, layer)
    batched.run(rows.groups(used[:0], used[:0]), parts, *scratch, layer)  # does nothing
    out, whole, term = torch.empty(x.shape), torch.empty(x.shape), torch.empty_like(x)
    REFERENCE.combine(parts, rows.part_of, routing.weights, term, torch.empty(x.shape), out)
    kernels, places, _, _ = batched.parts(layer)
    assert isinstance(kernels, CompiledExperts)
    run_experts(kernels, x, routing, used, places, (parts, *scratch, whole), num_threads)
    assert torch.equal(out, whole)
    return out


def run_experts(
    kernels: CompiledExperts,
    x: Tensor,
    routing: Routing,
    slots: NDArray[np.int64],
    places: SlotPlaces,
    buffers: tuple[Tensor, ...],
    num_threads: int,
) -> None:
    """Run experts as compiled layers do where all of them are resident.

    slots: of each distinct expert, ascending by expert. buffers: parts, gate, up and out of
    `CompiledExperts.layer_call`.
    """
    call = kernels.layer_call(x, routing.experts.shape[1], places, *buffers, num_threads)
    chosen, of_slots = (routing.experts, routing.weights), struct("ExpertPlaces")(*places)
    kernels.calls.experts(
        call.variant,
        num_threads,
        kernels.types.ctypes.data,
        x.data_ptr(),
        *(each.data_ptr() for each in chosen),
        slots.ctypes.data,
        ctypes.addressof(of_slots),
        *(each.data_ptr() for each in buffers),
        *routing.experts.shape,
        x.shape[1],
        buffers[1].shape[1],
    )


def attention(
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Sequence[Segment],
    kv_cache: KVCache,
    compute: Compute,
    out: Tensor,
    **scores: Any,
) -> None:
    """Stores keys and values of all rows, then attends."""
    cached = CachedAttention(layer, kv_cache, compute, Scores(**scores))
    cached.store(key, value, segments)
    cached.attend(query, segments, out)


def plain_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    sees: Tensor,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Masked softmax in float64; query [rows, heads, head_dim], sees [rows, tokens].

    A head's sink is one more score, whose value is nothing.
    """
    rows, heads, head_dim = query.shape
    group = heads // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * (scale or head_dim**-0.5)
    scores = scores.masked_fill(~sees, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, rows, 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(keys)], values)


class Watched(Workspace):
    """Remembers how far it was filled."""

    highest = 0

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = super().take(name, shape, dtype)
        tensor.view(torch.uint8).fill_(0xFF)  # NaN: nobody may rely on what a buffer held before
        self.highest = max(self.highest, self.state.top)
        return tensor

    def take_all(self, *wanted: tuple[str, tuple[int, ...], torch.dtype]) -> list[Tensor]:
        return [self.take(*each) for each in wanted]


class Threads:
    """Runs every piece of work on a thread of a pool, and says that it has as many as told."""

    def __init__(self, num_threads: int, pool: ThreadPoolExecutor) -> None:
        self.num_threads = self.num_cores = num_threads
        self.num_works = 0
        self._pool = pool

    def submit(self, work: Work) -> Future[None]:
        self.num_works += 1
        return self._pool.submit(work)

    def run(self, works: Sequence[Work]) -> None:
        for future in wait([self.submit(work) for work in works]).done:
            future.result()
