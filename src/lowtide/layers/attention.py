"""Attention of a flat batch over the KV cache, without masks, gathers or repeats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from lowtide.compute import Compute
from lowtide.errors import InternalError
from lowtide.layers.batch import KVRange, Segment
from lowtide.layers.causal_attention import attend_causal_segment
from lowtide.layers.rows import in_chunks, num_rows_of
from lowtide.layers.sdpa import PLAIN, Scores, by_head, sdpa_bytes, spread_not_finite
from lowtide.memory.chunking import OPERATOR_TILES, TILE_ROWS, longest_tile, pieces, tiles
from lowtide.memory.kv_cache import KVCache

QUERY_ROWS = OPERATOR_TILES["attention"]
"""Rows per tile (and up to 15 more) of attention over whole blocks.

Fixed, because it decides bits.
"""


class Run(NamedTuple):
    """Queries of one block, in consecutive tiles."""

    kv: KVRange
    block: slice
    rows: slice
    end_position: int  # end of the positions that they see

    @property
    def is_shared(self) -> bool:
        """True if threads split by key head (bounds SDPA's copies of K and V).

        Each thread then takes one head of one tile after the other.
        """
        return num_rows_of(self.block) > TILE_ROWS


def blocks(segment: Segment) -> Iterator[Run]:
    """Yield the whole blocks of a segment."""
    row, position = segment.start, segment.first_position
    while row < segment.stop:
        block_end = (position // segment.block_length + 1) * segment.block_length
        stop = min(segment.stop, row + block_end - position)
        position += stop - row
        rows = slice(row, stop)
        yield Run(segment.kv, rows, rows, max(position, segment.sees_to))
        row = stop


class CachedAttention(NamedTuple):
    """Attention of one layer over its keys and values in the cache.

    Queries, keys and values are [rows, heads, head_dim], from any projection.
    """

    layer: int  # of the cache
    kv_cache: KVCache
    compute: Compute
    scores: Scores = PLAIN

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        segments: Sequence[Segment],
    ) -> None:
        """Write all rows of a short pass, then attend with them."""
        self.store(key, value, segments)
        self.attend(query, segments, out)

    def store(
        self, key: Tensor, value: Tensor, segments: Sequence[Segment], first_row: int = 0
    ) -> None:
        """Write a batch's rows from `first_row` on, before any of its queries attend.

        Values are replaced by NaN, in place, where keys are not finite.
        """
        spread_not_finite(key, value)
        stop_row = first_row + len(key)
        for segment in segments:
            start, stop = max(first_row, segment.start), min(stop_row, segment.stop)
            if start < stop:
                rows = slice(start - first_row, stop - first_row)
                position = segment.first_position + start - segment.start
                self.kv_cache.write(self.layer, segment.kv, position, key[rows], value[rows])

    def attend(self, query: Tensor, segments: Sequence[Segment], out: Tensor) -> None:
        """Attend with all rows of a batch, segment by segment."""
        for segment in segments:
            if segment.block_length == 1:
                read = partial(self.kv_cache.read, self.layer, segment.kv)
                attend_causal_segment(query, segment, read, self.scores, self.compute, out)
                continue
            for block in blocks(segment):
                attend, rows = partial(self.attend_run, block), block.rows
                in_chunks("attention", self.compute.workspace, attend, query[rows], out[rows])

    def attend_run(self, run: Run, query: Tensor, out: Tensor) -> None:
        """Attend with a chunk of a run's tiles, each row to all keys; `out` may be `query`.

        Nothing is masked, so the query heads that share a key head are simply more rows of it:
        grouped-query attention without repeating a key. Copies of all queries exist together.
        """
        if not self.scores.are_plain:
            raise InternalError("Only causal attention has windows or sinks.")
        workspace, executor = self.compute.workspace, self.compute.executor
        keys, values = self.kv_cache.read(self.layer, run.kv, run.end_position)
        kv_heads, (rows, heads, head_dim) = keys.shape[0], query.shape
        num_together = 1 if run.is_shared else kv_heads  # in a call
        num_pieces = executor.num_threads if run.is_shared else 1
        parts = pieces(kv_heads, -(-kv_heads // num_pieces))
        with workspace.scope():
            of_call = query[: longest_tile(rows, QUERY_ROWS), : heads // kv_heads * num_together]
            workspace.library("attention", len(parts) * sdpa_bytes(of_call, keys[:num_together]))
            copies = workspace.take("query", (rows * heads, head_dim), query.dtype)
            if query.is_meta:  # nothing is computed, only counted
                return
            by_tile = []
            for tile in tiles(rows, QUERY_ROWS):
                strided = by_head(query[tile], kv_heads)
                copy = copies[tile.start * heads : tile.stop * heads].view(strided.shape)
                by_tile.append((copy.copy_(strided), by_head(out[tile], kv_heads)))
            attend = partial(_attend_heads, by_tile, keys, values, self.scores.scale, num_together)
            executor.run([partial(attend, part) for part in parts])


def _attend_heads(
    tiles: Sequence[tuple[Tensor, Tensor]],
    keys: Tensor,
    values: Tensor,
    scale: float | None,
    num_together: int,
    part: slice,
) -> None:
    """Attend with some key heads of tiles, `num_together` per call.

    tiles: queries and outputs, each [kv_heads, group, rows, head_dim].
    keys, values: [kv_heads, tokens, head_dim].
    """
    for query, out in tiles:
        for start in range(part.start, part.stop, num_together):
            heads = slice(start, min(part.stop, start + num_together))
            folded = query[heads].flatten(1, 2)  # a view
            attended = F.scaled_dot_product_attention(
                folded[None], keys[heads][None], values[heads][None], scale=scale
            )
            spread_not_finite(folded[None], attended)
            out[heads].copy_(attended.view(out[heads].shape))
