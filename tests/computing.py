"""What layers compute with in tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowtide.compute import Compute
from lowtide.experts.at_once import ExpertsAtOnce
from lowtide.experts.rows import ExpertRows, Routing
from lowtide.kernels.reference import REFERENCE, Kernels
from lowtide.layers.attention import CachedAttention
from lowtide.layers.batch import Segment
from lowtide.layers.sdpa import Scores
from lowtide.memory.arena import Arena
from lowtide.memory.kv_cache import KVCache
from lowtide.memory.workspace import Buffers, Workspace
from lowtide.threads.executor import Executor, InlineExecutor


def on_this_thread(
    workspace: Buffers | None = None,
    kernels: Kernels = REFERENCE,
    executor: Executor | None = None,
) -> Compute:
    """Plain torch in 64 MiB, unless something else is given."""
    if workspace is None:
        workspace = Workspace(Arena(64 << 20).bytes)
    return Compute(executor or InlineExecutor(), kernels, workspace)


def summed_at_once(
    at_once: ExpertsAtOnce, x: Tensor, routing: Routing, width: int, layer: int, num_threads: int
) -> Tensor:
    """All experts of some tokens, expert e in slot e, and their sum: in one call for each of the
    two, and in one for both."""
    shape = (routing.experts.numel(), x.shape[1])
    num_experts = int(routing.experts.max()) + 1
    rows = ExpertRows(REFERENCE.sort_pairs(routing.experts, num_experts))
    parts, scratch = x[rows.token_of], torch.empty(2, shape[0], width, dtype=x.dtype)
    used = np.array(rows.demanded)
    at_once.run(rows.groups(used, used), parts, *scratch, layer)
    at_once.run(rows.groups(used[:0], used[:0]), parts, *scratch, layer)  # does nothing
    out, whole, term = torch.empty(x.shape), torch.empty(x.shape), torch.empty_like(x)
    REFERENCE.combine(parts, rows.part_of, routing.weights, term, torch.empty(x.shape), out)
    kernels, places, _, _ = at_once.parts(layer)
    buffers = (parts, *scratch, whole)
    kernels.run_experts(x, *routing, used, places, *buffers, num_threads=num_threads)
    assert torch.equal(out, whole)
    return out


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
