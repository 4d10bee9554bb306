"""Attention of a pass of many rows: beside what it adds to, nothing but keys and values is whole.

First keys and values, a tile of rows after the other, straight into the KV cache. Then chunks of
tiles of queries: projected, attended, and what comes of them added to the hidden states. The
products have tiles of their own (`layers/rows.py`), others than SDPA's queries: where a chunk ends
within one of them, its queries, and what has been attended to, wait for the next chunk.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from lowtide.compute import Compute
from lowtide.config import ModelConfig
from lowtide.errors import InternalError
from lowtide.kernels.operands import HeadNorms, Rotation
from lowtide.layers.attention import QUERY_ROWS, attend_block, blocks, is_shared
from lowtide.layers.batch import Batch, Segment
from lowtide.layers.linear import Linear
from lowtide.layers.norm import Norm
from lowtide.layers.projection import Projection
from lowtide.layers.rotary import Rotations
from lowtide.layers.rows import num_rows_of, tiles_of
from lowtide.layers.sdpa import spread_not_finite
from lowtide.memory.chunking import MAX_REMAINDER, window_rows
from lowtide.memory.kv_cache import KVCache
from lowtide.memory.workspace import TILE_ROWS, tiles


class Run(NamedTuple):
    """Tiles of queries of one block, one after the other."""

    segment: Segment
    block: slice
    rows: slice
    end_position: int  # of what they see


class Chunk(NamedTuple):
    """Runs of queries that exist together, and the tiles of products that they lie in."""

    runs: list[Run]
    start: int  # the first row of those tiles
    projected: list[slice]  # whose queries it needs and no chunk before it did
    finished: list[slice]  # whose last rows are attended to in it
    waiting: slice  # of its last tile, if that is not finished


class LongAttention:
    """`GroupedAttention` of bidirectional passes of more rows than a tile has."""

    def __init__(
        self,
        layer: int,
        config: ModelConfig,
        projection: Projection,
        output: Linear,
        norms: HeadNorms | None,
        kv_cache: KVCache,
        compute: Compute,
    ) -> None:
        self._layer = layer
        self._config = config
        self._projection = projection
        self._output = output
        self._norms = norms
        self._kv_cache = kv_cache
        self._compute = compute

    def forward(self, x: Tensor, norm: Norm, batch: Batch, rotations: Rotations) -> None:
        """`x += attention(norm(x))`, x [rows, hidden]."""
        for tile in tiles_of(x):
            self._keep(x[tile], norm, batch.segments, rotations, tile)
        num_rows, spec = len(x), self._config.attention
        workspace = self._compute.workspace
        together = workspace.together("attention", num_rows)
        with workspace.scope():
            shape = (window_rows(num_rows, together), spec.num_heads, spec.head_dim)
            window = workspace.take("queries", shape, x.dtype)
            chunks = list(chunks_of(batch.segments, num_rows, together + MAX_REMAINDER))
            if x.is_meta:
                chunks = [_counted(x, chunks)]
            for chunk in chunks:
                self._run_chunk(chunk, x, norm, rotations, window)

    def _keep(
        self,
        x: Tensor,
        norm: Norm,
        segments: Sequence[Segment],
        rotations: Rotations,
        tile: slice,
    ) -> None:
        """Keys and values of a tile, into the KV cache."""
        spec, workspace = self._config.attention, self._compute.workspace
        with workspace.scope():
            shape = (len(x), 2 * spec.num_kv_heads, spec.head_dim)
            both = workspace.take("keys and values", shape, x.dtype)
            with workspace.scope():
                self._projection.keys_values(norm.of(x), both.view(len(x), -1))
            key, value = both[:, : spec.num_kv_heads], both[:, spec.num_kv_heads :]
            weight = None if self._norms is None else self._norms.key
            self._turn(key, weight, rotations.of(tile))
            spread_not_finite(key, value)
            for segment in segments:
                start, stop = max(tile.start, segment.start), min(tile.stop, segment.stop)
                if start < stop:
                    part = slice(start - tile.start, stop - tile.start)
                    position = segment.first_position + start - segment.start
                    kv = segment.kv
                    self._kv_cache.write(self._layer, kv, position, key[part], value[part])

    def _run_chunk(
        self, chunk: Chunk, x: Tensor, norm: Norm, rotations: Rotations, window: Tensor
    ) -> None:
        """window: queries from the chunk's first tile on, [rows, heads, head_dim], and in the
        place of each what it has attended to."""

        def own(rows: slice) -> Tensor:
            return window[rows.start - chunk.start : rows.stop - chunk.start]

        for tile in chunk.projected:
            self._project(x[tile], norm, rotations, tile, own(tile))
        for run in chunk.runs:
            keys, values = self._kv_cache.read(self._layer, run.segment.kv, run.end_position)
            rows = own(run.rows)
            attend_block(keys, values, None, self._compute, is_shared(run.block), rows, rows)
        for tile in chunk.finished:
            self._add(own(tile), x[tile])
        if chunk.finished:
            _move(window, chunk.waiting.start - chunk.start, num_rows_of(chunk.waiting))

    def _project(
        self, x: Tensor, norm: Norm, rotations: Rotations, tile: slice, query: Tensor
    ) -> None:
        workspace = self._compute.workspace
        with workspace.scope():
            self._projection.queries(norm.of(x), query.view(len(x), -1))
        weight = None if self._norms is None else self._norms.query
        with workspace.scope():
            self._turn(query, weight, rotations.of(tile))

    def _add(self, attended: Tensor, x: Tensor) -> None:
        workspace = self._compute.workspace
        with workspace.scope():
            update = workspace.take("update", tuple(x.shape), x.dtype)
            self._output.forward(attended.view(len(x), -1), update)
            x.add_(update)

    def _turn(self, heads: Tensor, weight: Tensor | None, rotation: Rotation) -> None:
        """Normalises and rotates queries or keys [rows, heads, head_dim] in place."""
        kernels, workspace = self._compute.kernels, self._compute.workspace
        num_cores = self._compute.executor.num_cores
        if weight is not None:
            normed = heads if len(weight) == heads.shape[-1] else heads.flatten(1)
            eps = self._config.rms_norm_eps
            kernels.rms_norm(normed, weight, eps, workspace, normed, num_cores)
        kernels.rotate(heads, rotation, workspace, num_cores)


def chunks_of(segments: Sequence[Segment], num_rows: int, max_rows: int) -> Iterator[Chunk]:
    """All tiles of queries of a batch of so many rows, in chunks of up to `max_rows`.

    Raises InternalError for causal segments, whose passes are short.
    """
    products = list(tiles(num_rows, TILE_ROWS))
    stops = [tile.stop for tile in products]
    for runs in _runs(segments, max_rows):
        start, stop = runs[0].rows.start, runs[-1].rows.stop
        finished = slice(bisect_right(stops, start), bisect_right(stops, stop))
        covered = [bisect_left(stops, row) + 1 if row else 0 for row in (start, stop)]
        waiting_from = stops[finished.stop - 1] if finished.stop else 0
        yield Chunk(
            runs,
            products[finished.start].start,
            products[covered[0] : covered[1]],
            products[finished],
            slice(waiting_from, stops[covered[1] - 1]),
        )


def _runs(segments: Sequence[Segment], max_rows: int) -> Iterator[list[Run]]:
    """Each of up to `max_rows` together, or of one tile."""
    runs: list[Run] = []
    for segment in segments:
        if segment.block_length == 1:
            raise InternalError(f"A pass of more than {TILE_ROWS} rows is causal.")
        for block, end_position in blocks(segment):
            for tile in tiles(num_rows_of(block), QUERY_ROWS):
                rows = slice(block.start + tile.start, block.start + tile.stop)
                if runs and rows.stop - runs[0].rows.start > max_rows:
                    yield runs
                    runs = []
                if runs and runs[-1].block == block:
                    rows = slice(runs.pop().rows.start, rows.stop)
                runs.append(Run(segment, block, rows, end_position))
    if runs:
        yield runs


def _counted(x: Tensor, chunks: Sequence[Chunk]) -> Chunk:
    """A chunk that stands for all, where nothing is computed, only counted: the longest run of
    queries, and the longest tile."""
    runs = max((chunk.runs for chunk in chunks), key=lambda runs: sum(map(_num_rows, runs)))
    start, [longest] = runs[0].rows.start, tiles_of(x)
    tile = slice(start, start + num_rows_of(longest))
    return Chunk(runs, start, [tile], [tile], slice(tile.stop, tile.stop))


def _num_rows(run: Run) -> int:
    return num_rows_of(run.rows)


def _move(window: Tensor, start: int, num_rows: int) -> None:
    """So many rows from `start` on, to the front; no piece overlaps its source."""
    for first in range(0, num_rows, max(1, start)):
        length = min(start, num_rows - first)
        window[first : first + length].copy_(window[start + first : start + first + length])
