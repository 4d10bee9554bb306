"""Self-attention of a layer with grouped query heads: projections, norms, rotation, output."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lowtide.compute import Compute
from lowtide.config import ModelConfig
from lowtide.kernels.operands import HeadNorms, Rotation
from lowtide.layers.attention import attention
from lowtide.layers.batch import Batch
from lowtide.layers.linear import Linear
from lowtide.layers.rows import in_tiles
from lowtide.memory.kv_cache import KVCache


class Projection(Protocol):
    """From hidden states to queries, keys and values, side by side."""

    def forward(self, x: Tensor, out: Tensor) -> None:
        """x [rows, hidden]; out [rows, query_size + 2 * kv_size]. A `Linear` is one: fused."""
        ...


class SeparateQKV:
    """Three products, each into its columns."""

    def __init__(self, query: Linear, key: Linear, value: Linear, config: ModelConfig) -> None:
        self._projections = (query, key, value)
        spec = config.attention
        self._widths = [spec.query_size, spec.kv_size, spec.kv_size]

    def forward(self, x: Tensor, out: Tensor) -> None:
        columns = torch.split(out, self._widths, dim=1)
        for projection, own in zip(self._projections, columns, strict=True):
            projection.forward(x, own)


class GroupedAttention:
    """Knows its layer's index in the KV cache; does not know how its weights are stored."""

    def __init__(
        self,
        layer: int,
        config: ModelConfig,
        projection: Projection,
        output: Linear,
        norms: HeadNorms | None,
        kv_cache: KVCache,
        compute: Compute,
        sinks: Tensor | None = None,
        window: int = 0,
    ) -> None:
        """sinks, window: see `layers.attention.attention`."""
        self._layer = layer
        self._config = config
        self._projection = projection
        self._output = output
        self._norms = norms
        self._kv_cache = kv_cache
        self._compute = compute
        self._sinks = sinks
        self._window = window

    def forward(self, x: Tensor, batch: Batch, rotation: Rotation) -> Tensor:
        """x [rows, hidden] in the compute dtype: a buffer which is given back. Returns [rows,
        hidden], alive until the enclosing scope ends."""
        spec, num_rows = self._config.attention, x.shape[0]
        workspace = self._compute.workspace
        heads, kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        qkv = workspace.take("qkv", (num_rows, heads + 2 * kv_heads, head_dim), x.dtype)
        self._projection.forward(x, qkv.view(num_rows, -1))
        workspace.give_back(x)
        in_tiles(self._normalise_and_rotate, qkv[:, : heads + kv_heads], *rotation)
        query, key, value = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        attended = workspace.take("attended", (num_rows, heads, head_dim), x.dtype)
        attention(
            self._layer,
            query,
            key,
            value,
            batch.segments,
            self._kv_cache,
            self._compute,
            attended,
            window=self._window,
            sinks=self._sinks,
        )
        workspace.give_back(qkv)
        update = workspace.take("update", tuple(x.shape), x.dtype)
        self._output.forward(attended.view(num_rows, -1), update)
        return update

    def _normalise_and_rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """In place, [rows, heads, head_dim]: queries, then keys."""
        kernels, workspace, config = self._compute.kernels, self._compute.workspace, self._config
        rotation, eps = Rotation(cos, sin), config.rms_norm_eps
        if self._norms is None:
            kernels.rotate(x, rotation, workspace)
        else:
            num_queries = config.attention.num_heads
            kernels.normalise_and_rotate(x, num_queries, self._norms, eps, rotation, workspace)
