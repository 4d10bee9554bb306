"""Attention of a flat batch over the KV cache, without masks, gathers or repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.compute import Compute
from lowtide.errors import InternalError
from lowtide.layers.batch import Segment
from lowtide.layers.rows import in_chunks
from lowtide.memory.chunking import OPERATOR_TILES
from lowtide.memory.kv_cache import KVCache
from lowtide.memory.workspace import TILE_ROWS, Buffers, tiles

CAUSAL_ROWS = 128
"""Rows of a causal tile (and up to 15 more): bounds what its products allocate."""

QUERY_ROWS = OPERATOR_TILES["attention"]
"""Rows of a tile that sees whole blocks (and up to 15 more). Fixed, because it decides bits."""

MAX_GROUP = 8
"""Query heads of one key head that are computed together at most: a latent has one key head for
all of them, and they shall not all be one piece of work. Fixed, because it decides bits."""

SPLIT_OPERATIONS = 1 << 23
"""Multiplications and additions; less is not worth handing to another thread."""

Read = Callable[[int], tuple[Tensor, Tensor]]
"""A segment's first so many keys and values in one layer, each [kv_heads, tokens, head_dim]."""


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
    """Stores keys and values of all rows, then attends segment by segment.

    query [rows, heads, head_dim]; key, value [rows, kv_heads, head_dim]; out [rows, heads,
    head_dim]. scale: of the scores, by default head_dim ** -0.5. Causal segments divide their
    heads among the executor's threads. The kernels may have an operator for single rows.

    Of causal segments only: window: positions that a row sees, its own included, 0 for all.
    sinks: [heads] float32, a score for each head that takes its share of the softmax and adds
    nothing to the output.
    """
    scores = _Scores(scale, window, sinks)
    for segment in segments:
        rows = slice(segment.start, segment.stop)
        kv_cache.write(layer, segment.kv, segment.first_position, key[rows], value[rows])
        read = partial(kv_cache.read, layer, segment.kv)
        if segment.block_length == 1:
            _attend_causal_segment(query, segment, read, scores, compute, out)
            continue
        if window or sinks is not None:
            raise InternalError("Only causal attention has windows or sinks.")
        for block, end_position in _blocks(segment):
            is_long = block.stop - block.start > TILE_ROWS
            attend = partial(_attend, *read(end_position), scale, compute, is_long)
            in_chunks("attention", compute.workspace, attend, query[block], out[block])


class _Scores(NamedTuple):
    """What becomes of a layer's scores; see `attention`."""

    scale: float | None
    window: int
    sinks: Tensor | None


def _attend_causal_segment(
    query: Tensor, segment: Segment, read: Read, scores: _Scores, compute: Compute, out: Tensor
) -> None:
    """Tile by tile; single rows by the kernels' own operator, where they have one."""
    kernels, num_cores = compute.kernels, compute.executor.num_cores
    has_row_kernel = scores.sinks is None and kernels.attends_rows(query)
    for tile, position, end_position in _causal_tiles(segment):
        keys, values = read(end_position)
        first = max(0, position - scores.window + 1) if scores.window else 0  # that the tile sees
        if first:  # a view costs as much as a small operator
            keys, values = keys[:, first:], values[:, first:]
        if has_row_kernel and tile.stop - tile.start == 1:
            row = tile.start
            kernels.attend_row(query[row], keys, values, scores.scale, out[row], num_cores)
        else:
            _attend_causally(
                query[tile], keys, values, position - first, scores, compute, out[tile]
            )


def _blocks(segment: Segment) -> Iterator[tuple[slice, int]]:
    """The rows of each block of a segment, and the end of what they may see."""
    row, position = segment.start, segment.first_position
    while row < segment.stop:
        block_end = (position // segment.block_length + 1) * segment.block_length
        stop = min(segment.stop, row + block_end - position)
        position += stop - row
        yield slice(row, stop), max(position, segment.sees_to)
        row = stop


def _causal_tiles(segment: Segment) -> Iterator[tuple[slice, int, int]]:
    """The rows of each tile, the position of its first row and that after its last."""
    for rows in tiles(segment.stop - segment.start, CAUSAL_ROWS):
        tile = slice(segment.start + rows.start, segment.start + rows.stop)
        yield tile, segment.first_position + rows.start, segment.first_position + rows.stop


def _attend(
    keys: Tensor,
    values: Tensor,
    scale: float | None,
    compute: Compute,
    is_shared: bool,
    query: Tensor,
    out: Tensor,
) -> None:
    """Every query row sees all of keys and values [kv_heads, tokens, head_dim].

    Nothing is masked, so the query heads that share a key head are simply more rows of it:
    grouped-query attention without repeating a key. Rows are a chunk of tiles, the copies of all
    of which exist together. is_shared: key heads are divided among the executor's threads, each
    of which takes one head of one tile after the other, so that SDPA copies keys and values of no
    more than a head for each thread.
    """
    workspace, executor = compute.workspace, compute.executor
    kv_heads, (rows, heads, head_dim) = keys.shape[0], query.shape
    own_tiles = list(tiles(rows, QUERY_ROWS))
    num_pieces = executor.num_threads if is_shared else 1
    parts = _pieces(kv_heads, -(-kv_heads // num_pieces))
    with workspace.scope():
        longest = max(tile.stop - tile.start for tile in own_tiles)
        num_together = 1 if is_shared else kv_heads  # in a call
        of_call = query[:longest, : heads // kv_heads * num_together]
        call_bytes = _sdpa_bytes(of_call, keys[:num_together])
        workspace.library("attention", (len(parts) if is_shared else 1) * call_bytes)
        copies = workspace.take("query", (rows * heads, head_dim), query.dtype)
        if query.is_meta:  # nothing is computed, only counted
            return
        by_tile = []
        for tile in own_tiles:
            shape = (tile.stop - tile.start, kv_heads, heads // kv_heads, head_dim)
            folded = copies[tile.start * heads : tile.stop * heads].view(kv_heads, -1, head_dim)
            by_head = query[tile].view(shape).permute(1, 2, 0, 3)
            folded.view(by_head.shape).copy_(by_head)
            by_tile.append((folded, out[tile].view(shape).permute(1, 2, 0, 3)))
        works = [
            partial(
                _attend_folded,
                [(q[part], o[part]) for q, o in by_tile],
                keys[part],
                values[part],
                scale,
                num_together,
            )
            for part in parts
        ]
        if num_pieces == 1:
            works[0]()
        else:
            executor.run(works)


def _attend_folded(
    tiles: Sequence[tuple[Tensor, Tensor]],
    keys: Tensor,
    values: Tensor,
    scale: float | None,
    num_together: int,
) -> None:
    """Some key heads of tiles, so many in a call: queries [kv_heads, group * rows, head_dim] and
    where their outputs go [kv_heads, group, rows, head_dim]."""
    for query, out in tiles:
        for heads in _pieces(len(keys), num_together):
            own_keys, own_values = keys[heads], values[heads]
            attended = F.scaled_dot_product_attention(
                query[None, heads], own_keys[None], own_values[None], scale=scale
            )
            out[heads].copy_(attended.view(out[heads].shape))


def _attend_causally(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    position: int,
    scores: _Scores,
    compute: Compute,
    out: Tensor,
) -> None:
    """Row i, at `position + i`, sees keys and values [kv_heads, tokens, head_dim] up to its own,
    of which the first is the first that row 0 sees."""
    workspace, executor = compute.workspace, compute.executor
    rows, heads, head_dim = query.shape
    shape = (rows, keys.shape[0], heads // keys.shape[0], head_dim)
    with workspace.scope():
        by_head = query.view(shape).permute(1, 2, 0, 3)
        grouped = workspace.take("query", tuple(by_head.shape), query.dtype)
        grouped.copy_(by_head)
        band = None
        if rows > 1 and 0 < scores.window < position + rows:
            band = _band(rows, position, scores.window, query.dtype, workspace)
            workspace.library("window attention", _band_bytes(query, keys))
        workspace.library("attention", _causal_bytes(query, keys))
        outputs = out.view(shape).permute(1, 2, 0, 3)
        sinks = None if scores.sinks is None else scores.sinks.view(*shape[1:3], 1)
        attend = partial(_attend_heads, position, scores.scale, band)
        is_divided = 4 * query.numel() * keys.shape[1] >= SPLIT_OPERATIONS
        if shape[2] <= MAX_GROUP and not is_divided:  # views cost as much as small operators
            attend(grouped, keys, values, sinks, outputs)
            return
        num_pieces = executor.num_threads if is_divided else 1
        works = _works(attend, grouped, keys, values, sinks, outputs, num_pieces)
        if num_pieces == 1:
            for work in works:
                work()
        else:
            executor.run(works)


def _works(
    attend: Callable[..., None],
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    num_pieces: int,
) -> list[Callable[[], None]]:
    """`attend` of a tile's heads in about so many pieces; query, out [kv_heads, group, rows,
    head_dim]; sinks [kv_heads, group, 1]."""
    kv_heads, group = query.shape[:2]
    return [
        partial(
            attend,
            query[heads, part],
            keys[heads],
            values[heads],
            None if sinks is None else sinks[heads, part],
            out[heads, part],
        )
        for heads in _pieces(kv_heads, -(-kv_heads // num_pieces))
        for part in _pieces(group, MAX_GROUP)
    ]


def _pieces(length: int, piece: int) -> list[slice]:
    return [slice(start, min(length, start + piece)) for start in range(0, length, piece)]


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


def _attend_heads(
    position: int,
    scale: float | None,
    band: Tensor | None,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Some key heads and of their query heads some; query, out [kv_heads, group, rows, head_dim].

    With a band (see `_band`) all is one product; sinks [kv_heads, group, 1].
    """
    if band is None and query.shape[2] > 1:
        _attend_square(query, keys, values, position, scale, sinks, out)
        return
    if band is None:
        output, log_sum = _flash_folded(query, keys, values, scale)
    else:
        group = query.shape[1]
        own_keys, own_values = (x[:, None].expand(-1, group, -1, -1) for x in (keys, values))
        output, log_sum = _flash(query, own_keys, own_values, False, scale, band)
    out.copy_(output)
    _leave_to_sinks(out, log_sum, sinks)


def _attend_square(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    position: int,
    scale: float | None,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """The tile itself is a causal square whose keys a group shares through a stride of zero.

    What came before it is seen by all its rows. The two are joined by the weight of each in the
    whole softmax, which their log-sum-exps give; so does what the sinks leave.
    """
    own_keys, own_values = (x[:, None, position:].expand(query.shape) for x in (keys, values))
    own, own_sum = _flash(query, own_keys, own_values, True, scale)
    if position == 0:
        out.copy_(own)
        _leave_to_sinks(out, own_sum, sinks)
        return
    before, before_sum = _flash_folded(query, keys[:, :position], values[:, :position], scale)
    share = torch.sigmoid(before_sum - own_sum)[..., None]
    out.copy_(own.float().lerp_(before.float(), share))
    if sinks is not None:
        _leave_to_sinks(out, torch.logaddexp(before_sum, own_sum), sinks)


def _leave_to_sinks(out: Tensor, log_sum: Tensor, sinks: Tensor | None) -> None:
    """Takes from attention outputs what their softmax gives to the sinks.

    out [kv_heads, group, rows, head_dim]; log_sum [kv_heads, group, rows]: log-sum-exp of a row's
    scores without its sink; sinks [kv_heads, group, 1].
    """
    if sinks is not None:
        out.mul_(torch.sigmoid(log_sum - sinks)[..., None])


def _flash_folded(
    query: Tensor, keys: Tensor, values: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """`_flash` of rows that all see the same keys and values: the heads of a group are more rows
    there, as in `_attend`. Outputs [kv_heads, group, rows, head_dim]; sums in float32."""
    kv_heads, group, rows, head_dim = query.shape
    folded = query.view(1, kv_heads, group * rows, head_dim)
    output, log_sum = _flash(folded, keys[None], values[None], False, scale)
    return output.view(query.shape), log_sum.view(kv_heads, group, rows)


def _flash(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    is_causal: bool,
    scale: float | None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """SDPA with the log-sum-exp of every row's scores in float32 [batch, heads, rows].

    Called by the names of its kernels because `scaled_dot_product_attention` keeps that number to
    itself.
    """
    if query.is_cuda:
        if mask is not None:
            mask = _with_aligned_rows(mask).expand(*query.shape[:3], -1)
        output, log_sum, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, keys, values, mask, True, 0.0, is_causal, scale=scale
        )
        return output, log_sum[:, :, : query.shape[2]]  # the kernel pads its rows
    output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return output, log_sum


def _with_aligned_rows(mask: Tensor) -> Tensor:
    """The same values [rows, tokens], each row from 16 bytes on, as the CUDA kernel wants them."""
    num_tokens = mask.shape[1]
    return F.pad(mask, (0, -num_tokens % 8))[:, :num_tokens]


def _sdpa_bytes(query: Tensor, keys: Tensor) -> int:
    """What SDPA allocates on a CPU: its output, a log-sum-exp per row, tiles of scores, and for
    narrow types, where it chooses to, a packed copy of the keys and values."""
    output_bytes: int = query.numel() * query.dtype.itemsize
    packed_bytes: int = 2 * keys.numel() * keys.dtype.itemsize if keys.dtype.itemsize < 4 else 0
    sums_bytes = 4 * query.shape[0] * query.shape[1]
    return output_bytes + sums_bytes + _scores_bytes(query, keys) + packed_bytes


def _scores_bytes(query: Tensor, keys: Tensor) -> int:
    """One thread's tiles: scores in float32 and in the compute type, and outputs in float32.

    The CPU kernel takes 32, 64 or 256 rows at a time, by their number, and 512 keys.
    """
    rows = query.shape[0] * (query.shape[1] // keys.shape[0])
    tile_rows = 256 if rows >= 768 else 64 if rows >= 192 else 32
    return tile_rows * ((4 + query.dtype.itemsize) * 512 + 4 * query.shape[2] + 16)


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
    others_bytes = (num_concurrent - 1) * _scores_bytes(query, keys)
    sums_bytes = 4 * 4 * rows * heads
    return 2 * _sdpa_bytes(query, keys) + joined_bytes + square_bytes + others_bytes + sums_bytes
