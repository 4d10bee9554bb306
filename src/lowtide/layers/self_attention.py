"""Self-attention of a layer with grouped query heads: projections, norms, rotation, output."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lowtide.config import ModelConfig
from lowtide.kernels.products import REFERENCE, Products
from lowtide.kernels.routing import is_for_triton
from lowtide.layers.attention import attention
from lowtide.layers.batch import Batch
from lowtide.layers.linear import Linear
from lowtide.layers.norm import rms_norm
from lowtide.layers.rotary import Rotation, rotate
from lowtide.memory.kv_cache import KVCache
from lowtide.memory.workspace import Buffers
from lowtide.threads.executor import Executor


class Projection(Protocol):
    """From hidden states to queries, keys and values, side by side."""

    def forward(self, x: Tensor, out: Tensor) -> None:
        """x [rows, hidden]; out [rows, query_size + 2 * kv_size]. A `Linear` is one: fused."""
        ...


class SeparateQKV:
    """Three products, each into its columns."""

    def __init__(self, query: Linear, key: Linear, value: Linear, config: ModelConfig) -> None:
        self._products = (query, key, value)
        spec = config.attention
        self._widths = [spec.query_size, spec.kv_size, spec.kv_size]

    def forward(self, x: Tensor, out: Tensor) -> None:
        for product, columns in zip(
            self._products, torch.split(out, self._widths, dim=1), strict=True
        ):
            product.forward(x, columns)


class QKNorm(NamedTuple):
    """RMS norm of queries and keys before they are rotated.

    Weights are [head_dim], each head by itself, or as wide as all heads, which are one then.
    """

    query: Tensor
    key: Tensor


class GroupedAttention:
    """Knows its layer's index in the KV cache; does not know how its weights are stored."""

    def __init__(
        self,
        layer: int,
        config: ModelConfig,
        projection: Projection,
        output: Linear,
        norm: QKNorm | None,
        kv_cache: KVCache,
        executor: Executor,
        products: Products = REFERENCE,
        sinks: Tensor | None = None,
        window: int = 0,
    ) -> None:
        """sinks, window: see `layers.attention.attention`."""
        self._layer = layer
        self._config = config
        self._projection = projection
        self._output = output
        self._norm = norm
        self._kv_cache = kv_cache
        self._executor = executor
        self._products = products
        self._sinks = sinks
        self._window = window

    def forward(
        self, x: Tensor, batch: Batch, rotation: Rotation, workspace: Buffers, out: Tensor
    ) -> None:
        """x, out [rows, hidden] in the compute dtype."""
        spec, num_rows = self._config.attention, x.shape[0]
        heads, kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        with workspace.scope():
            qkv = workspace.take("qkv", (num_rows, heads + 2 * kv_heads, head_dim), x.dtype)
            self._projection.forward(x, qkv.view(num_rows, -1))
            query, key, value = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
            both = qkv[:, : heads + kv_heads]
            self._normalise_and_rotate(both, query, key, rotation, workspace)
            attended = workspace.take("attended", (num_rows, heads, head_dim), x.dtype)
            attention(
                self._layer,
                query,
                key,
                value,
                batch.segments,
                self._kv_cache,
                workspace,
                attended,
                window=self._window,
                sinks=self._sinks,
                executor=self._executor,
                products=self._products,
            )
            self._output.forward(attended.view(num_rows, -1), out)

    def _normalise_and_rotate(
        self, both: Tensor, query: Tensor, key: Tensor, rotation: Rotation, workspace: Buffers
    ) -> None:
        """In place, [rows, heads, head_dim]; `both`: queries, then keys."""
        norm, eps = self._norm, self._config.rms_norm_eps
        if norm is not None:
            if is_for_triton(both) and norm.query.shape[0] == both.shape[-1]:
                from lowtide.kernels.triton_rows import normalise_and_rotate

                normalise_and_rotate(both, self._config.attention.num_heads, *norm, eps, *rotation)
                return
            self._normalise(query, norm.query, workspace)
            self._normalise(key, norm.key, workspace)
        rotate(both, rotation, workspace, self._products)

    def _normalise(self, x: Tensor, weight: Tensor, workspace: Buffers) -> None:
        """x: [rows, heads, head_dim], in place."""
        if weight.shape[0] != x.shape[-1]:
            x = x.flatten(1)  # a view: heads are adjacent
        rms_norm(x, weight, self._config.rms_norm_eps, workspace, x, self._products)
