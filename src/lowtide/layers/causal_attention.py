"""Causal attention, optionally with a sliding window or sinks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
"""Rows per causal tile (and up to 15 more): bounds the allocations of its products."""

MAX_GROUP = 8
"""Most query heads of one key head that are computed together.

A latent has one key head for all query heads, which would otherwise be one work item. Fixed,
because it decides bits.
"""

SPLIT_OPERATIONS = 1 << 23
"""Multiplications and additions below which another thread is not worth its cost."""

_ONE_ROW = (slice(0, 1),)

Read = Callable[[int, int], tuple[Tensor, Tensor]]
"""Reads keys and values of one layer up to a position, from another on.

Each is [kv_heads, tokens, head_dim].
"""


class _Tile(NamedTuple):
    """Consecutive rows of some key heads, with some query heads of each."""

    query: Tensor  # [kv_heads, group, rows, head_dim]
    out: Tensor  # as query
    keys: Tensor  # [kv_heads, tokens, head_dim], of which row i sees `position + i + 1`
    values: Tensor  # as keys
    position: int
    scale: float | None
    sinks: Tensor | None  # [kv_heads, group, 1]
    band: Tensor | None = None  # see `_band`; with a band there is only one product

    def part(self, heads: slice, group: slice) -> _Tile:
        return self._replace(
            query=self.query[heads, group],
            out=self.out[heads, group],
            keys=self.keys[heads],
            values=self.values[heads],
            sinks=None if self.sinks is None else self.sinks[heads, group],
        )


def attend_causal_segment(
    query: Tensor, segment: Segment, read: Read, scores: Scores, compute: Compute, out: Tensor
) -> None:
    """Attend tile by tile; single rows use the kernels' own operator if there is one."""
    kernels, num_cores = compute.kernels, compute.executor.num_cores
    scale, window, sinks = scores
    has_row_kernel = kernels.attends_rows(query)
    num_rows = segment.stop - segment.start
    by_rows = has_row_kernel and segment.goes_by_rows
    for tile in _ONE_ROW if num_rows == 1 else _row_tiles(num_rows, by_rows):
        rows = slice(segment.start + tile.start, segment.start + tile.stop)
        position = segment.first_position + tile.start
        first = max(0, position - window + 1) if window else 0  # first position that the tile sees
        keys, values = read(segment.first_position + tile.stop, first)
        if has_row_kernel and rows.stop - rows.start == 1:
            row = rows.start
            kernels.attend_row(query[row], keys, values, scale, out[row], num_cores, sinks)
        else:
            kv_heads = keys.shape[0]
            own, own_out = by_head(query[rows], kv_heads), by_head(out[rows], kv_heads)
            by_key = None if sinks is None else sinks.view(kv_heads, -1, 1)
            whole = _Tile(own, own_out, keys, values, position - first, scale, by_key)
            _attend_tile(whole, window, compute)


def _row_tiles(num_rows: int, by_rows: bool) -> Iterable[slice]:
    return pieces(num_rows, 1) if by_rows else tiles(num_rows, CAUSAL_ROWS)


def _attend_tile(tile: _Tile, window: int, compute: Compute) -> None:
    """Attend with all heads, on the executor's threads if there is enough work."""
    workspace, executor, position = compute.workspace, compute.executor, tile.position
    kv_heads, group, rows, _ = tile.query.shape
    before = workspace.state
    query = workspace.take("query", tuple(tile.query.shape), tile.query.dtype)
    tile = tile._replace(query=query.copy_(tile.query))
    if rows > 1 and 0 < window < position + rows:
        tile = tile._replace(band=_band(rows, position, window, query.dtype, workspace))
    if query.is_meta:  # counted
        workspace.library("attention", _causal_bytes(tile))
    is_divided = 4 * query.numel() * tile.keys.shape[1] >= SPLIT_OPERATIONS
    if group <= MAX_GROUP and not is_divided:  # parts cost as much as small operators
        _attend_heads(tile)
    else:
        num_pieces = executor.num_threads if is_divided else 1
        works = [
            partial(_attend_heads, tile.part(heads, queries))
            for heads in pieces(kv_heads, -(-kv_heads // num_pieces))
            for queries in pieces(group, MAX_GROUP)
        ]
        if num_pieces == 1:
            for work in works:
                work()
        else:
            executor.run(works)
    workspace.state = before


def _band(rows: int, position: int, window: int, dtype: torch.dtype, workspace: Buffers) -> Tensor:
    """Make the addend of a tile's scores [rows, position + rows]: -inf outside the window.

    A tile is short, so its width is at most the window plus the tile.
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
    """Attend as `_flash_folded`, with a causal square of the tile's own keys.

    The keys before it are seen by all rows. The two results are joined by their weights in the
    whole softmax, which follow from their log-sum-exps. A group shares its keys by a stride of
    zero.
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
    """Run `flash` for rows that all see the same keys and values.

    The heads of a group are more rows, as in `attention`. Outputs [kv_heads, group, rows,
    head_dim]; float32 sums that can be viewed as [kv_heads, group, rows]: views cost as much as
    small operators.
    """
    kv_heads, group, rows, head_dim = query.shape
    folded = query.view(1, kv_heads, group * rows, head_dim)
    output, log_sum = flash(folded, keys[None], values[None], False, scale)
    return output.view(query.shape), log_sum


def _causal_bytes(tile: _Tile) -> int:
    """Bound the bytes that SDPA allocates for both parts of a tile.

    Includes joining them in float32. Narrow types are packed, too: keys and values of the square,
    once for each query head, or of all keys if there is a band.
    """
    query, keys = tile.query, tile.keys
    kv_heads, group, _, head_dim = query.shape
    num_elements, item_bytes = query.numel(), query.dtype.itemsize
    num_concurrent = min(kv_heads * -(-group // MAX_GROUP), 8)
    num_bytes = 2 * sdpa_bytes(query, keys) + (num_concurrent - 1) * scores_bytes(query, keys)
    num_bytes += 4 * num_elements + 4 * 4 * (num_elements // head_dim)  # joined, sums
    if item_bytes < 4:
        num_packed = num_elements + (0 if tile.band is None else group * keys.numel())
        num_bytes += 4 * num_elements + 2 * num_packed * item_bytes
    return num_bytes
