"""Attention of a flat batch over the KV cache, without masks, gathers or repeats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from lowtide.compute import Compute
from lowtide.errors import InternalError
from lowtide.layers.batch import Segment
from lowtide.layers.causal_attention import Scores, attend_causal_segment
from lowtide.layers.rows import in_chunks, num_rows_of
from lowtide.layers.sdpa import sdpa_bytes, spread_not_finite
from lowtide.memory.chunking import OPERATOR_TILES, longest_tile, pieces
from lowtide.memory.kv_cache import KVCache
from lowtide.memory.workspace import TILE_ROWS, tiles

QUERY_ROWS = OPERATOR_TILES["attention"]
"""Rows of a tile that sees whole blocks (and up to 15 more). Fixed, because it decides bits."""


def attention(
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Sequence[Segment],
    kv_cache: KVCache,
    compute: Compute,
    out: Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    sinks: Tensor | None = None,
) -> None:
    """Stores keys and values of all rows, then attends segment by segment. Values of keys that are
    not finite become NaN, in place.

    query [rows, heads, head_dim]; key, value [rows, kv_heads, head_dim]; out [rows, heads,
    head_dim]. scale: of the scores, by default head_dim ** -0.5. Causal segments divide their
    heads among the executor's threads. The kernels may have an operator for single rows.

    Of causal segments only: window: positions that a row sees, its own included, 0 for all.
    sinks: [heads] float32, a score for each head that takes its share of the softmax and adds
    nothing to the output.
    """
    scores = Scores(scale, window, sinks)
    spread_not_finite(key, value)
    for segment in segments:
        rows = slice(segment.start, segment.stop)
        kv_cache.write(layer, segment.kv, segment.first_position, key[rows], value[rows])
        read = partial(kv_cache.read, layer, segment.kv)
        if segment.block_length == 1:
            attend_causal_segment(query, segment, read, scores, compute, out)
            continue
        if window or sinks is not None:
            raise InternalError("Only causal attention has windows or sinks.")
        for block, end_position in blocks(segment):
            is_long = is_shared(block)
            attend = partial(attend_block, *read(end_position), scale, compute, is_long)
            in_chunks("attention", compute.workspace, attend, query[block], out[block])


def is_shared(block: slice) -> bool:
    """Whether all threads take part in a block's attention, and how: see `attend_block`."""
    return num_rows_of(block) > TILE_ROWS


def blocks(segment: Segment) -> Iterator[tuple[slice, int]]:
    """The rows of each block of a segment, and the end of what they may see."""
    row, position = segment.start, segment.first_position
    while row < segment.stop:
        block_end = (position // segment.block_length + 1) * segment.block_length
        stop = min(segment.stop, row + block_end - position)
        position += stop - row
        yield slice(row, stop), max(position, segment.sees_to)
        row = stop


def attend_block(
    keys: Tensor,
    values: Tensor,
    scale: float | None,
    compute: Compute,
    is_shared: bool,
    query: Tensor,
    out: Tensor,
) -> None:
    """Every query row sees all of keys and values [kv_heads, tokens, head_dim]; `out` may be
    `query` [rows, heads, head_dim].

    Nothing is masked, so the query heads that share a key head are simply more rows of it:
    grouped-query attention without repeating a key. Rows are a chunk of tiles, the copies of all
    of which exist together. is_shared: key heads are divided among the executor's threads, each
    of which takes one head of one tile after the other, so that SDPA copies keys and values of no
    more than a head for each thread.
    """
    workspace, executor = compute.workspace, compute.executor
    kv_heads, (rows, heads, head_dim) = keys.shape[0], query.shape
    num_pieces = executor.num_threads if is_shared else 1
    parts = pieces(kv_heads, -(-kv_heads // num_pieces))
    with workspace.scope():
        longest = longest_tile(rows, QUERY_ROWS)
        num_together = 1 if is_shared else kv_heads  # in a call
        of_call = query[:longest, : heads // kv_heads * num_together]
        call_bytes = sdpa_bytes(of_call, keys[:num_together])
        workspace.library("attention", (len(parts) if is_shared else 1) * call_bytes)
        copies = workspace.take("query", (rows * heads, head_dim), query.dtype)
        if query.is_meta:  # nothing is computed, only counted
            return
        by_tile = _copied_by_head(query, out, copies, kv_heads)
        works = [
            partial(_attend_folded, by_tile, keys, values, scale, num_together, part)
            for part in parts
        ]
        if num_pieces == 1:
            works[0]()
        else:
            executor.run(works)


def _copied_by_head(
    query: Tensor, out: Tensor, copies: Tensor, kv_heads: int
) -> list[tuple[Tensor, Tensor]]:
    """Of each tile the queries, in `copies`, and where their outputs go: see `_attend_folded`."""
    heads, head_dim = query.shape[1:]
    by_tile = []
    for tile in tiles(len(query), QUERY_ROWS):
        shape = (tile.stop - tile.start, kv_heads, heads // kv_heads, head_dim)
        folded = copies[tile.start * heads : tile.stop * heads].view(kv_heads, -1, head_dim)
        by_head = query[tile].view(shape).permute(1, 2, 0, 3)
        folded.view(by_head.shape).copy_(by_head)
        by_tile.append((folded, out[tile].view(shape).permute(1, 2, 0, 3)))
    return by_tile


def _attend_folded(
    tiles: Sequence[tuple[Tensor, Tensor]],
    keys: Tensor,
    values: Tensor,
    scale: float | None,
    num_together: int,
    part: slice,
) -> None:
    """Some key heads of tiles, so many in a call: queries [kv_heads, group * rows, head_dim] and
    where their outputs go [kv_heads, group, rows, head_dim]."""
    for query, out in tiles:
        for start in range(part.start, part.stop, num_together):
            heads = slice(start, min(part.stop, start + num_together))
            own_keys, own_values = keys[heads], values[heads]
            attended = F.scaled_dot_product_attention(
                query[None, heads], own_keys[None], own_values[None], scale=scale
            )
            spread_not_finite(query[None, heads], attended)
            out[heads].copy_(attended.view(out[heads].shape))
