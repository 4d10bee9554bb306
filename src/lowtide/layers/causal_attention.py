"""Attention of rows that see what came before them, perhaps in a window, perhaps with sinks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.compute import Compute
from lowtide.layers.batch import Segment
from lowtide.layers.sdpa import Scores, by_head, flash, scores_bytes, sdpa_bytes
from lowtide.memory.chunking import pieces
from lowtide.memory.workspace import Buffers, tiles

CAUSAL_ROWS = 128
"""Rows of a causal tile (and up to 15 more): bounds what its products allocate."""

MAX_GROUP = 8
"""Query heads of one key head that are computed together at most: a latent has one key head for
all of them, and they shall not all be one piece of work. Fixed, because it decides bits."""

SPLIT_OPERATIONS = 1 << 23
"""Multiplications and additions; less is not worth handing to another thread."""

Read = Callable[[int], tuple[Tensor, Tensor]]
"""A segment's first so many keys and values in one layer, each [kv_heads, tokens, head_dim]."""


class _Tile(NamedTuple):
    """Rows one after the other, of some key heads and of each one's query heads some."""

    query: Tensor  # [kv_heads, group, rows, head_dim]
    keys: Tensor  # [kv_heads, tokens, head_dim]
    values: Tensor  # as keys
    out: Tensor  # as query
    position: int  # the last key that the first row sees
    scale: float | None
    sinks: Tensor | None  # [kv_heads, group, 1]
    band: Tensor | None  # see `_band`; with one, all is one product

    def part(self, heads: slice, group: slice) -> _Tile:
        return self._replace(
            query=self.query[heads, group],
            keys=self.keys[heads],
            values=self.values[heads],
            out=self.out[heads, group],
            sinks=None if self.sinks is None else self.sinks[heads, group],
        )


def attend_causal_segment(
    query: Tensor, segment: Segment, read: Read, scores: Scores, compute: Compute, out: Tensor
) -> None:
    """Tile by tile; single rows by the kernels' own operator, where they have one."""
    kernels, num_cores = compute.kernels, compute.executor.num_cores
    has_row_kernel = scores.sinks is None and kernels.attends_rows(query)
    for rows in tiles(segment.stop - segment.start, CAUSAL_ROWS):
        tile = slice(segment.start + rows.start, segment.start + rows.stop)
        position = segment.first_position + rows.start
        keys, values = read(segment.first_position + rows.stop)
        first = max(0, position - scores.window + 1) if scores.window else 0  # that the tile sees
        if first:  # a view costs as much as a small operator
            keys, values = keys[:, first:], values[:, first:]
        if has_row_kernel and tile.stop - tile.start == 1:
            row = tile.start
            kernels.attend_row(query[row], keys, values, scores.scale, out[row], num_cores)
        else:
            _attend_tile(query[tile], keys, values, position - first, scores, compute, out[tile])


def _attend_tile(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    position: int,
    scores: Scores,
    compute: Compute,
    out: Tensor,
) -> None:
    """Row i, at `position + i`, sees keys and values [kv_heads, tokens, head_dim] up to its own,
    of which the first is the first that row 0 sees."""
    workspace, executor, rows, kv_heads = compute.workspace, compute.executor, len(query), len(keys)
    with workspace.scope():
        strided = by_head(query, kv_heads)
        grouped = workspace.take("query", tuple(strided.shape), query.dtype)
        grouped.copy_(strided)
        band = None
        if rows > 1 and 0 < scores.window < position + rows:
            band = _band(rows, position, scores.window, query.dtype, workspace)
            workspace.library("window attention", _band_bytes(query, keys))
        workspace.library("attention", _causal_bytes(query, keys))
        sinks = None if scores.sinks is None else scores.sinks.view(kv_heads, -1, 1)
        tile = _Tile(
            grouped, keys, values, by_head(out, kv_heads), position, scores.scale, sinks, band
        )
        is_divided = 4 * query.numel() * keys.shape[1] >= SPLIT_OPERATIONS
        if grouped.shape[1] <= MAX_GROUP and not is_divided:  # parts cost as much as operators
            _attend_heads(tile)
            return
        num_pieces = executor.num_threads if is_divided else 1
        works = [
            partial(_attend_heads, tile.part(heads, group))
            for heads in pieces(kv_heads, -(-kv_heads // num_pieces))
            for group in pieces(grouped.shape[1], MAX_GROUP)
        ]
        if num_pieces == 1:
            for work in works:
                work()
        else:
            executor.run(works)


def _band(rows: int, position: int, window: int, dtype: torch.dtype, workspace: Buffers) -> Tensor:
    """What is added to the scores of a tile [rows, position + rows]: -inf outside the window.

    As a tile is short, this is no more than the window and a square of the tile.
    """
    shape = (rows, position + rows)
    band, later, all_hidden = (
        workspace.take(name, shape, dtype) for name in ("window", "after window", "hidden")
    )
    all_hidden.fill_(-torch.inf)
    torch.triu(all_hidden, position + 1, out=later)
    torch.tril(all_hidden, position - window, out=band)
    band.add_(later)
    workspace.give_back(later, all_hidden)
    return band


def _attend_heads(tile: _Tile) -> None:
    query, out = tile.query, tile.out
    if tile.band is not None:
        group = query.shape[1]
        keys, values = (x[:, None].expand(-1, group, -1, -1) for x in (tile.keys, tile.values))
        output, log_sum = flash(query, keys, values, False, tile.scale, tile.band)
    elif query.shape[2] == 1:
        output, log_sum = _flash_folded(query, tile.keys, tile.values, tile.scale)
    else:
        output, log_sum = _attend_square(tile)
    out.copy_(output)
    if tile.sinks is not None:  # they take their share of the softmax
        out.mul_(torch.sigmoid(log_sum.view(out.shape[:3]) - tile.sinks)[..., None])


def _attend_square(tile: _Tile) -> tuple[Tensor, Tensor]:
    """As `_flash_folded`. The tile itself is a causal square whose keys a group shares through a
    stride of zero.

    What came before it is seen by all its rows. The two are joined by the weight of each in the
    whole softmax, which their log-sum-exps give.
    """
    query, keys, values, position = tile.query, tile.keys, tile.values, tile.position
    own_keys, own_values = (x[:, None, position:].expand(query.shape) for x in (keys, values))
    own, own_sum = flash(query, own_keys, own_values, True, tile.scale)
    if position == 0:
        return own, own_sum
    before, before_sum = _flash_folded(query, keys[:, :position], values[:, :position], tile.scale)
    before_sum = before_sum.view(own_sum.shape)
    share = torch.sigmoid(before_sum - own_sum)[..., None]
    joined = own.float().lerp_(before.float(), share)
    return joined, own_sum if tile.sinks is None else torch.logaddexp(before_sum, own_sum)


def _flash_folded(
    query: Tensor, keys: Tensor, values: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """`flash` of rows that all see the same keys and values: the heads of a group are more rows
    there, as in `attention`. Outputs [kv_heads, group, rows, head_dim]; sums float32 of any shape
    that can be viewed as [kv_heads, group, rows]: views cost as much as small operators."""
    kv_heads, group, rows, head_dim = query.shape
    folded = query.view(1, kv_heads, group * rows, head_dim)
    output, log_sum = flash(folded, keys[None], values[None], False, scale)
    return output.view(query.shape), log_sum


def _band_bytes(query: Tensor, keys: Tensor) -> int:
    """What a tile with a band allocates beyond `_causal_bytes`: keys and values of narrow types,
    packed once per query head."""
    if keys.dtype.itemsize == 4:
        return 0
    num_bytes: int = 2 * query.shape[1] * keys.shape[1] * keys.shape[2] * keys.dtype.itemsize
    return num_bytes


def _causal_bytes(query: Tensor, keys: Tensor) -> int:
    """The same for both parts of a tile, and for joining them in float32."""
    rows, heads, head_dim = query.shape
    num_concurrent = min(keys.shape[0] * -(-heads // (keys.shape[0] * MAX_GROUP)), 8)
    fp32_bytes: int = 4 * query.numel()
    joined_bytes = fp32_bytes if query.dtype.itemsize == 4 else 2 * fp32_bytes
    # The square's keys and values may be packed once per query head.
    square_bytes = 2 * query.numel() * query.dtype.itemsize if query.dtype.itemsize < 4 else 0
    others_bytes = (num_concurrent - 1) * scores_bytes(query, keys)
    sums_bytes = 4 * 4 * rows * heads
    return 2 * sdpa_bytes(query, keys) + joined_bytes + square_bytes + others_bytes + sums_bytes
