"""Causal attention whose output is weighed by a gate that is projected with the queries."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lowtide.compute import Compute
from lowtide.config import AttentionSpec, ModelConfig
from lowtide.errors import InternalError
from lowtide.kernels.layer_parts import GroupedParts, NormParts
from lowtide.kernels.operands import HeadNorms
from lowtide.layers.attention import CachedAttention
from lowtide.layers.batch import Batch
from lowtide.layers.linear import Linear
from lowtide.layers.norm import Norm
from lowtide.layers.projection import SideBySide
from lowtide.layers.rotary import Rotations
from lowtide.layers.rows import num_rows_of, tiles_of
from lowtide.memory.kv_cache import KVCache


class GatedAttention:
    """Self-attention of one layer with grouped query heads, each followed by its gate."""

    def __init__(
        self,
        layer: int,
        config: ModelConfig,
        queries: Linear,
        keys_values: SideBySide,
        output: Linear,
        norms: HeadNorms,
        kv_cache: KVCache,
        compute: Compute,
    ) -> None:
        """queries: to a head's query, then its gate, head by head."""
        self._spec = spec = config.mixer(AttentionSpec, layer)
        if spec.rope is None:
            raise InternalError("Gated attention has a rotation.")
        self._rope = spec.rope
        self._is_usual = spec.rope in config.ropes[:1]
        self._eps = config.rms_norm_eps
        self._queries = queries
        self._keys_values = keys_values
        self._output = output
        self._norms = norms
        self._compute = compute
        self._attention = CachedAttention(layer, kv_cache, compute)

    def parts(self, norm: Norm) -> GroupedParts | None:
        """Return parts for kernels that run whole layers; None for what these lack."""
        layer, kv_cache, *_ = self._attention
        arrays = kv_cache.arrays(layer)
        if arrays is None or not self._is_usual:
            return None
        return GroupedParts(
            norm.parts(),
            (self._queries.product, *self._keys_values.products),
            NormParts(self._norms.query, self._eps),
            NormParts(self._norms.key, self._eps),
            self._output.product,
            *arrays,
            self._spec.num_heads,
            self._spec.head_dim**-0.5,
            has_gates=True,
        )

    def forward(self, x: Tensor, norm: Norm, batch: Batch, rotations: Rotations) -> None:
        """Compute `x += attention(norm(x))`, x [rows, hidden] in the compute dtype."""
        layer, kv_cache, *_ = self._attention
        spec, workspace = self._spec, self._compute.workspace
        num_rows, heads, kv_heads = len(x), spec.num_heads, spec.num_kv_heads
        kv_cache.open_layer(layer, num_rows, workspace)
        shape = (num_rows, heads, spec.head_dim)
        attended, gates = (workspace.take(n, shape, x.dtype) for n in ("attended", "gates"))
        qkv = workspace.take("qkv", (num_rows, heads + 2 * kv_heads, spec.head_dim), x.dtype)
        for tile in tiles_of(x):
            self._project(x[tile], norm, rotations, tile, qkv[tile], gates[tile])
        query, key, value = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        attend = partial(self._attention.run, query, key, value, attended)
        self._compute.between_graphs(attend, batch.segments)
        workspace.give_back(qkv)
        self._compute.kernels.sigmoid_weigh(attended, gates, self._compute.executor.num_cores)
        workspace.give_back(gates)
        update = workspace.take("update", tuple(x.shape), x.dtype)
        self._output.forward(attended.view(num_rows, -1), update)
        x.add_(update)

    def _project(
        self, x: Tensor, norm: Norm, rotations: Rotations, tile: slice, qkv: Tensor, gates: Tensor
    ) -> None:
        """Project a tile's hidden states to queries, keys and values, and to gates."""
        spec, workspace, kernels = self._spec, self._compute.workspace, self._compute.kernels
        num_rows, heads = num_rows_of(tile), spec.num_heads
        with workspace.scope():
            normed = norm.of(x)
            self._keys_values.forward(normed, qkv[:, heads:].flatten(1))
            both = workspace.take("queries", (num_rows, heads, 2, spec.head_dim), x.dtype)
            self._queries.forward(normed, both.view(num_rows, -1))
            qkv[:, :heads].copy_(both[:, :, 0])
            gates.copy_(both[:, :, 1])
        with workspace.scope():
            kernels.normalise_and_rotate(
                qkv[:, : heads + spec.num_kv_heads],
                heads,
                self._norms,
                self._eps,
                rotations.of(self._rope, tile),
                workspace,
                self._compute.executor.num_cores,
            )
