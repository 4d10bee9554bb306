"""Self-attention of a layer with grouped query heads: projections, norms, rotation, output."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.compute import Compute
from lowtide.config import ModelConfig
from lowtide.errors import InternalError
from lowtide.kernels.layer_parts import AttentionParts
from lowtide.kernels.operands import HeadNorms, Rotation
from lowtide.layers.attention import attention
from lowtide.layers.batch import Batch
from lowtide.layers.linear import Linear
from lowtide.layers.long_attention import LongAttention
from lowtide.layers.norm import Norm
from lowtide.layers.projection import Projection
from lowtide.layers.rotary import Rotations
from lowtide.memory.kv_cache import KVCache
from lowtide.memory.workspace import TILE_ROWS


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
        self._long = LongAttention(layer, config, projection, output, norms, kv_cache, compute)

    def parts(self, norm: Norm) -> AttentionParts | None:
        """For kernels that run whole layers; None with windows or sinks, or without a cache."""
        arrays = self._kv_cache.arrays(self._layer)
        if self._window or self._sinks is not None or arrays is None:
            return None
        return AttentionParts(
            norm.weight,
            self._projection.products,
            self._norms,
            self._output.product,
            *arrays,
            self._config.attention.num_heads,
        )

    def forward(self, x: Tensor, norm: Norm, batch: Batch, rotations: Rotations) -> None:
        """`x += attention(norm(x))`, x [rows, hidden] in the compute dtype."""
        self._kv_cache.open_layer(len(x), self._compute.workspace)
        if len(x) <= TILE_ROWS:
            self._run_short(x, norm, batch, rotations.whole)
        elif self._window or self._sinks is not None:
            raise InternalError("Only causal attention has windows or sinks.")
        else:
            self._long.forward(x, norm, batch, rotations)

    def _run_short(self, x: Tensor, norm: Norm, batch: Batch, rotation: Rotation) -> None:
        spec, num_rows = self._config.attention, x.shape[0]
        workspace = self._compute.workspace
        heads, kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        normed = norm.of(x)
        qkv = workspace.take("qkv", (num_rows, heads + 2 * kv_heads, head_dim), x.dtype)
        self._projection.forward(normed, qkv.view(num_rows, -1))
        workspace.give_back(normed)
        self._normalise_and_rotate(qkv[:, : heads + kv_heads], rotation)
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
        x.add_(update)

    def _normalise_and_rotate(self, x: Tensor, rotation: Rotation) -> None:
        """In place, [rows, heads, head_dim]: queries, then keys."""
        kernels, workspace, config = self._compute.kernels, self._compute.workspace, self._config
        num_cores = self._compute.executor.num_cores
        if self._norms is None:
            kernels.rotate(x, rotation, workspace, num_cores)
        else:
            num_queries, eps = config.attention.num_heads, config.rms_norm_eps
            kernels.normalise_and_rotate(
                x, num_queries, self._norms, eps, rotation, workspace, num_cores
            )
