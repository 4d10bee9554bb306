"""What layers compute with in tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lowtide.compute import Compute
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
