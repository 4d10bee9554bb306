"""Attention of a flat batch over the KV cache, without masks, gathers or repeats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.experts.executor import Executor, InlineExecutor
from lowtide.layers.batch import Segment
from lowtide.memory.kv_cache import KVCache
from lowtide.memory.workspace import Buffers, tiles

CAUSAL_ROWS = 128
"""Rows of a causal tile (and up to 15 more): bounds what its products allocate."""

MAX_GROUP = 8
"""Query heads of one key head that are computed together at most: a latent has one key head for
all of them, and they shall not all be one piece of work. Fixed, because it decides bits."""

SPLIT_OPERATIONS = 1 << 23
"""Multiplications and additions; less is not worth handing to another thread."""

_INLINE: Executor = InlineExecutor()


def attention(
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Sequence[Segment],
    kv_cache: KVCache,
    workspace: Buffers,
    out: Tensor,
    *,
    scale: float | None = None,
    executor: Executor = _INLINE,
) -> None:
    """Stores keys and values of all rows, then attends segment by segment.

    query [rows, heads, head_dim]; key, value [rows, kv_heads, head_dim]; out [rows, heads,
    head_dim]. scale: of the scores, by default head_dim ** -0.5. Causal segments divide their
    heads among the executor's threads.
    """
    for segment in segments:
        rows = slice(segment.start, segment.stop)
        kv_cache.write(layer, segment.kv, segment.first_position, key[rows], value[rows])
        if segment.block_length == 1:
            for tile, position, end_position in _causal_tiles(segment):
                keys, values = kv_cache.read(layer, segment.kv, end_position)
                _attend_causally(
                    query[tile], keys, values, position, scale, executor, workspace, out[tile]
                )
            continue
        for block, end_position in _blocks(segment):
            keys, values = kv_cache.read(layer, segment.kv, end_position)
            _attend(query[block], keys, values, scale, workspace, out[block])


def _blocks(segment: Segment) -> Iterator[tuple[slice, int]]:
    """The rows of each block of a segment, and the end of what they may see."""
    row, position = segment.start, segment.first_position
    while row < segment.stop:
        block_end = (position // segment.block_length + 1) * segment.block_length
        stop = min(segment.stop, row + block_end - position)
        position += stop - row
        yield slice(row, stop), position
        row = stop


def _causal_tiles(segment: Segment) -> Iterator[tuple[slice, int, int]]:
    """The rows of each tile, the position of its first row and that after its last."""
    for rows in tiles(segment.stop - segment.start, CAUSAL_ROWS):
        tile = slice(segment.start + rows.start, segment.start + rows.stop)
        yield tile, segment.first_position + rows.start, segment.first_position + rows.stop


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float | None,
    workspace: Buffers,
    out: Tensor,
) -> None:
    """Every query row sees all of keys and values [kv_heads, tokens, head_dim].

    Nothing is masked, so the query heads that share a key head are simply more rows of it:
    grouped-query attention without repeating a key.
    """
    rows, heads, head_dim = query.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    with workspace.scope():
        grouped = workspace.take("query", (kv_heads, group, rows, head_dim), query.dtype)
        grouped.copy_(query.view(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3))
        workspace.library("attention", _sdpa_bytes(query, keys))
        attended = F.scaled_dot_product_attention(
            grouped.view(1, kv_heads, group * rows, head_dim), keys[None], values[None], scale=scale
        )
        attended = attended.view(kv_heads, group, rows, head_dim).permute(2, 0, 1, 3)
        out.view(rows, kv_heads, group, head_dim).copy_(attended)


def _attend_causally(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    position: int,
    scale: float | None,
    executor: Executor,
    workspace: Buffers,
    out: Tensor,
) -> None:
    """Row i, at `position + i`, sees keys and values [kv_heads, tokens, head_dim] up to its own."""
    rows, heads, head_dim = query.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    with workspace.scope():
        grouped = workspace.take("query", (kv_heads, group, rows, head_dim), query.dtype)
        grouped.copy_(query.view(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3))
        workspace.library("attention", _causal_bytes(query, keys))
        by_head = out.view(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3)
        num_operations = 4 * query.numel() * keys.shape[1]
        num_pieces = executor.num_threads if num_operations >= SPLIT_OPERATIONS else 1
        works = [
            partial(
                _attend_heads,
                grouped[heads, part],
                keys[heads],
                values[heads],
                position,
                scale,
                by_head[heads, part],
            )
            for heads in _pieces(kv_heads, -(-kv_heads // num_pieces))
            for part in _pieces(group, MAX_GROUP)
        ]
        if num_pieces == 1:
            for work in works:
                work()
        else:
            executor.run(works)


def _pieces(length: int, piece: int) -> list[slice]:
    return [slice(start, min(length, start + piece)) for start in range(0, length, piece)]


def _attend_heads(
    query: Tensor, keys: Tensor, values: Tensor, position: int, scale: float | None, out: Tensor
) -> None:
    """Some key heads and of their query heads some; query, out [kv_heads, group, rows, head_dim].

    What came before the tile is seen by all its rows, so the heads of a group are more rows
    there, as in `_attend`; the tile itself is a causal square whose keys the group shares through
    a stride of zero. The two are joined by the weight of each in the whole softmax, which their
    log-sum-exps give.
    """
    kv_heads, group, rows, head_dim = query.shape
    folded = query.view(1, kv_heads, group * rows, head_dim)
    if rows == 1:
        whole, _ = _flash(folded, keys[None], values[None], False, scale)
        out.copy_(whole.view_as(query))
        return
    shape = (kv_heads, group, rows, head_dim)
    own_keys, own_values = (x[:, None, position:].expand(shape) for x in (keys, values))
    own, own_sum = _flash(query, own_keys, own_values, True, scale)
    if position == 0:
        out.copy_(own)
        return
    before, before_sum = _flash(
        folded, keys[None, :, :position], values[None, :, :position], False, scale
    )
    share = torch.sigmoid(before_sum.view(kv_heads, group, rows) - own_sum)[..., None]
    out.copy_(own.float().lerp_(before.view(shape).float(), share))


def _flash(
    query: Tensor, keys: Tensor, values: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The CPU's SDPA, with the log-sum-exp of every row's scores in float32 [batch, heads, rows].

    Called by its own name because `scaled_dot_product_attention` keeps that number to itself.
    """
    output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, is_causal, scale=scale
    )
    return output, log_sum


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
