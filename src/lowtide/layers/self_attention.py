"""Self-attention of a layer with grouped query heads: projections, norms, rotation, output.

A short pass is one tile. In a longer one only keys and values exist for all rows at once: they are
computed first, tile by tile, straight into the KV cache. Then chunks of query tiles
(`layers/query_chunks.py`) are projected and attended, and their outputs added to the hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.compute import Compute
from lowtide.config import AttentionSpec, ModelConfig
from lowtide.kernels.layer_parts import GroupedParts, NormParts
from lowtide.kernels.operands import HeadNorms
from lowtide.layers.attention import CachedAttention
from lowtide.layers.batch import Batch, Segment
from lowtide.layers.linear import Linear
from lowtide.layers.norm import Norm
from lowtide.layers.projection import Projection, SideBySide
from lowtide.layers.query_chunks import Chunk, chunks_of, longest_of
from lowtide.layers.rotary import Rotations
from lowtide.layers.rows import num_rows_of, tiles_of
from lowtide.layers.sdpa import Scores
from lowtide.memory.chunking import MAX_REMAINDER, window_rows
from lowtide.memory.kv_cache import KVCache
from lowtide.memory.workspace import TILE_ROWS


class _Inputs(NamedTuple):
    """Inputs of one layer's attention in one pass."""

    x: Tensor  # [rows, hidden], updated in place
    norm: Norm
    segments: Sequence[Segment]
    rotations: Rotations


class GroupedAttention:
    """Self-attention of one layer with grouped query heads, over weights in any storage."""

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
        gate: Linear | None = None,
        post_norm: Norm | None = None,
    ) -> None:
        """layer: of the model, whose config has its heads and window.

        sinks: see `Scores`.
        gate: from hidden states to `query_size`, for a spec that `has_gate`.
        post_norm: of the output, before it is added.
        """
        self._spec = config.mixer(AttentionSpec, layer)
        self._factor = config.multipliers.residual
        self._gate, self._post_norm = gate, post_norm
        self._is_usual = (
            self._spec.rope in config.ropes[:1]
            and not self._spec.has_value_norm
            and gate is None
            and post_norm is None
            and self._factor == 1
        )
        self._value_norm = None
        if self._spec.has_value_norm:
            ones = torch.ones(self._spec.head_dim, device=compute.device)
            self._value_norm = Norm(ones, config.rms_norm_eps, compute)
        self._eps = config.rms_norm_eps
        self._projection = projection
        self._output = output
        self._norms = norms
        self._compute = compute
        scores = Scores(self._spec.scale, self._spec.window, sinks)
        self._attention = CachedAttention(layer, kv_cache, compute, scores)

    def parts(self, norm: Norm) -> GroupedParts | None:
        """Return parts for kernels that run whole layers; None for what these lack."""
        layer, kv_cache, _, scores = self._attention
        arrays = kv_cache.arrays(layer)
        if arrays is None or not self._is_usual:
            return None
        norms = self._norms or (None, None)
        query_norm, key_norm = (None if x is None else NormParts(x, self._eps) for x in norms)
        return GroupedParts(
            norm.parts(),
            self._projection.whole.products,
            query_norm,
            key_norm,
            self._output.product,
            *arrays,
            self._spec.num_heads,
            self._spec.head_dim**-0.5 if scores.scale is None else scores.scale,
            scores.window,
            scores.sinks,
            group=kv_cache.group(layer),
        )

    def forward(self, x: Tensor, norm: Norm, batch: Batch, rotations: Rotations) -> None:
        """Compute `x += attention(norm(x))`, x [rows, hidden] in the compute dtype."""
        layer, kv_cache, *_ = self._attention
        kv_cache.open_layer(layer, len(x), self._compute.workspace)
        run = self._run_tile if len(x) <= TILE_ROWS else self._run_tiles
        run(_Inputs(x, norm, batch.segments, rotations))

    def _run_tile(self, inputs: _Inputs) -> None:
        """Process all rows at once: queries, keys and values exist together."""
        x, workspace, spec = inputs.x, self._compute.workspace, self._spec
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        qkv = workspace.take("qkv", (len(x), heads + 2 * kv_heads, spec.head_dim), x.dtype)
        self._project(self._projection.whole, inputs, slice(0, len(x)), heads, qkv)
        query, key, value = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        attended = workspace.take("attended", tuple(query.shape), x.dtype)
        attend = partial(self._attention.run, query, key, value, attended)
        self._compute.between_graphs(attend, inputs.segments)
        workspace.give_back(qkv)
        self._add(attended, x, inputs.norm)

    def _run_tiles(self, inputs: _Inputs) -> None:
        x, workspace, spec = inputs.x, self._compute.workspace, self._spec
        for tile in tiles_of(x):
            self._store(inputs, tile)
        num_rows, together = len(x), workspace.together("attention", len(x))
        shape = (window_rows(num_rows, together), spec.num_heads, spec.head_dim)
        window = workspace.take("queries", shape, x.dtype)
        chunks = list(chunks_of(inputs.segments, num_rows, together + MAX_REMAINDER))
        for chunk in [longest_of(chunks, num_rows)] if x.is_meta else chunks:
            self._run_chunk(chunk, inputs, window)

    def _store(self, inputs: _Inputs, tile: slice) -> None:
        """Write keys and values of a tile to the KV cache."""
        x, workspace, spec = inputs.x, self._compute.workspace, self._spec
        with workspace.scope():
            shape = (num_rows_of(tile), 2 * spec.num_kv_heads, spec.head_dim)
            both = workspace.take("keys and values", shape, x.dtype)
            self._project(self._projection.keys_values, inputs, tile, 0, both)
            key, value = both.chunk(2, dim=1)
            self._attention.store(key, value, inputs.segments, tile.start)

    def _run_chunk(self, chunk: Chunk, inputs: _Inputs, window: Tensor) -> None:
        """Attend with one chunk of queries.

        window: queries from the chunk's first tile on, [rows, heads, head_dim], replaced in place
        by their attention outputs.
        """

        def own(rows: slice) -> Tensor:
            return window[rows.start - chunk.start : rows.stop - chunk.start]

        for tile in chunk.projected:
            queries = own(tile)
            self._project(self._projection.queries, inputs, tile, queries.shape[1], queries)
        for run in chunk.runs:
            rows = own(run.rows)
            self._attention.attend_run(run, rows, rows)
        for tile in chunk.finished:
            self._add(own(tile), inputs.x[tile], inputs.norm)
        if chunk.finished:
            _move(window, chunk.waiting.start - chunk.start, num_rows_of(chunk.waiting))

    def _project(
        self,
        products: SideBySide,
        inputs: _Inputs,
        tile: slice,
        num_queries: int,
        out: Tensor,
    ) -> None:
        """Project a tile to queries, keys or both, normalised and rotated, and perhaps values.

        out [rows, heads, head_dim]: `num_queries` heads of queries, then keys, then values, if any.
        """
        kernels, workspace = self._compute.kernels, self._compute.workspace
        num_cores = self._compute.executor.num_cores
        before = workspace.state
        products.forward(inputs.norm.of(inputs.x[tile]), out.view(len(out), -1))
        workspace.state = before
        num_turned, rope = num_queries + self._spec.num_kv_heads, self._spec.rope
        turned, values = out[:, :num_turned], out[:, num_turned:]
        if self._value_norm is not None and values.shape[1]:
            self._value_norm.apply(values)
        if rope is None:
            self._normalise(turned, num_queries)
            return
        rotation = inputs.rotations.of(rope, tile)
        if self._norms is None:
            kernels.rotate(turned, rotation, workspace, num_cores)
        else:
            kernels.normalise_and_rotate(
                turned, num_queries, self._norms, self._eps, rotation, workspace, num_cores
            )
        workspace.state = before

    def _normalise(self, turned: Tensor, num_queries: int) -> None:
        """Normalise queries and keys where nothing rotates them; they are [rows, heads, dim]."""
        for heads, weight in zip(
            (turned[:, :num_queries], turned[:, num_queries:]), self._norms or (), strict=False
        ):
            if weight.shape[0] != self._spec.head_dim:  # all heads together
                heads = heads.flatten(1, 2)
            if heads.shape[1]:
                Norm(weight, self._eps, self._compute).apply(heads)

    def _add(self, attended: Tensor, x: Tensor, norm: Norm) -> None:
        """Compute `x += output(attended)`, gated and normalised as the model has it."""
        workspace = self._compute.workspace
        attended = attended.view(len(x), -1)
        if self._gate is not None:
            with workspace.scope():
                gates = workspace.take("attention gate", tuple(attended.shape), x.dtype)
                self._gate.forward(norm.of(x), gates)
                attended.mul_(gates.sigmoid_())
        before = workspace.state
        update = workspace.take("update", tuple(x.shape), x.dtype)
        self._output.forward(attended, update)
        if self._post_norm is not None:
            self._post_norm.apply(update)
        if self._factor != 1:
            update.mul_(self._factor)
        x.add_(update)
        workspace.state = before


def _move(window: Tensor, start: int, num_rows: int) -> None:
    """Move `num_rows` rows from `start` to the front, in pieces that do not overlap."""
    for first in range(0, num_rows, max(1, start)):
        length = min(start, num_rows - first)
        window[first : first + length].copy_(window[start + first : start + first + length])
