"""Statistics of rows of logits in Triton, by a product that keeps no logits.

    logits = x @ vocabulary^T

A program has `_BLOCK_ROWS` rows and one tile of the vocabulary, which it passes block by block: a
block of logits is rounded to the compute dtype, as those of whole rows are, guided, and reduced
where it was computed. A second, small launch joins the tiles of each row. No array holds logits.
Blocks have one shape, however many rows there are, so that a row's bits never depend on them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lowtide.kernels.row_statistics import (
    LEAST_EXPONENT,
    TILE_COLUMNS,
    Partials,
    RowStatistics,
)
from lowtide.kernels.tiled_head import HeadRows
from lowtide.kernels.triton_weights import add_product

# Up to 64 rows read each weight once, which is then all the work. A row's sum is that of one thread
# block's tensor cores; its steps are 128 bytes deep, 24 KiB a stage, of the 99 KiB that a consumer
# GPU's block may have. Guidance reads two blocks of rows for one of weights, and has a stage less.
_BLOCK_ROWS = 64
_BLOCK_COLUMNS = 128
_DEPTH_BYTES = 128
_NUM_STAGES = 3
_JOINED_ROWS = 8  # of a program

# The interpreter multiplies bfloat16 wrongly, without an error.
_UPCAST = triton.knobs.runtime.interpret
_NOWHERE = tl.constexpr(1 << 30)  # beyond any id
_LEAST = tl.constexpr(LEAST_EXPONENT)


def num_tiles(vocab_size: int) -> int:
    """Return the number of tiles that `reduce_tiles` divides a vocabulary into."""
    return -(-vocab_size // TILE_COLUMNS)


def reduce_tiles(inputs: HeadRows, vocabulary: Tensor, out: Partials) -> None:
    """Compute the partials of each tile of the logits of the first n rows of `inputs`.

    vocabulary [vocab, hidden]; all contiguous. out: [n, num_tiles(vocab)].
    """
    vocab_size, hidden = vocabulary.shape
    num_rows = out.best.shape[0]
    _reduce_tiles[(triton.cdiv(num_rows, _BLOCK_ROWS), num_tiles(vocab_size))](
        inputs.x,
        inputs.other,
        inputs.factors,
        vocabulary,
        *out,
        num_rows,
        hidden,
        vocab_size,
        TILE=TILE_COLUMNS,
        BLOCK_M=_BLOCK_ROWS,
        BLOCK_N=_BLOCK_COLUMNS,
        BLOCK_K=_DEPTH_BYTES // inputs.x.dtype.itemsize,
        UPCAST=_UPCAST,
        **launch_options(inputs.other is not None),
    )


def launch_options(is_guided: bool) -> dict[str, int]:
    """Return the compile options of `reduce_tiles`."""
    # Guidance is a difference, a product and a sum, each rounded: never fused.
    options = {"num_warps": 4, "num_stages": _NUM_STAGES, "enable_fp_fusion": False}
    return {**options, "num_warps": 8, "num_stages": _NUM_STAGES - 1} if is_guided else options


def join_tiles(partials: Partials, out: RowStatistics) -> None:
    """Compute `Partials.join`, but add up tiles in float32."""
    num_rows, num_tiles = partials.best.shape
    _join_tiles[(triton.cdiv(num_rows, _JOINED_ROWS),)](
        *partials,
        *out,
        num_rows,
        num_tiles,
        BLOCK_R=_JOINED_ROWS,
        BLOCK_T=triton.next_power_of_2(num_tiles),
    )


@triton.jit
def _reduce_tiles(
    x,
    other_x,
    factors,
    weight,
    bests,
    greatests,
    rests,
    seconds,
    moments,
    num_rows,
    hidden,
    vocab_size,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < num_rows
    first = tl.program_id(1) * TILE
    offset = row.to(tl.int64) * hidden
    best = tl.zeros((BLOCK_M,), tl.int32) + first
    greatest = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    rest = tl.zeros((BLOCK_M,), tl.float32)
    second = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    moment = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, tl.minimum(TILE, vocab_size - first), BLOCK_N):
        columns = first + start + tl.arange(0, BLOCK_N)
        is_column = columns < vocab_size
        matrix = weight + columns.to(tl.int64) * hidden
        if other_x is None:
            logits = _product(
                x + offset, matrix, is_row, is_column, hidden, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST
            )
        else:
            source, other = x + offset, other_x + offset
            logits, away = _products(
                source, other, matrix, is_row, is_column, hidden, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST
            )
            factor = tl.load(factors + row, mask=is_row, other=0.0)
            logits = (logits - away) * factor[:, None] + away
        logits = tl.where(is_column[None, :], logits, -float("inf"))
        block_best, block_greatest = _arg_max(logits, columns)
        is_new = _is_above(block_greatest, greatest)
        if seconds is not None:
            others = tl.where(columns[None, :] == block_best[:, None], -float("inf"), logits)
            block_second = tl.max(others, 1)
            second = tl.where(
                is_new, tl.maximum(block_second, greatest), tl.maximum(second, block_greatest)
            )
        before = greatest
        best = tl.where(is_new, block_best, best)
        greatest = tl.where(is_new, block_greatest, greatest)
        # Where all values so far are -inf, -inf is not subtracted: exponentials are 0.
        level = tl.where(greatest == -float("inf"), 0.0, greatest)
        below = logits - level[:, None]
        terms = tl.where(columns[None, :] == best[:, None], 0.0, tl.exp(below))
        scale = tl.exp(before - level)
        if moments is not None:
            moment = scale * (moment + tl.maximum(before - level, _LEAST) * (1.0 + rest))
            moment += tl.sum(terms * tl.maximum(below, _LEAST), 1)
        # A better one makes the best so far one of the rest.
        rest = rest * scale + tl.where(is_new, scale, 0.0) + tl.sum(terms, 1)
    place = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(bests + place, best, mask=is_row)
    tl.store(greatests + place, greatest, mask=is_row)
    tl.store(rests + place, rest, mask=is_row)
    if seconds is not None:
        tl.store(seconds + place, second, mask=is_row)
    if moments is not None:
        tl.store(moments + place, moment, mask=is_row)


@triton.jit
def _product(
    source,
    matrix,
    is_row,
    is_column,
    hidden,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Compute a block of logits, rounded to the dtype of `source`."""
    dtype = source.dtype.element_ty
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, hidden, BLOCK_K):
        is_k = first + k < hidden
        b = tl.load(
            matrix[None, :] + (first + k)[:, None],
            mask=is_k[:, None] & is_column[None, :],
            other=0.0,
        )
        a = tl.load(
            source[:, None] + (first + k)[None, :], mask=is_row[:, None] & is_k[None, :], other=0.0
        )
        total = add_product(a, b, total, UPCAST)
    return total.to(dtype).to(tl.float32)


@triton.jit
def _products(
    source,
    other,
    matrix,
    is_row,
    is_column,
    hidden,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Compute two blocks of logits, of rows that share each block of weights."""
    dtype = source.dtype.element_ty
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    other_total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, hidden, BLOCK_K):
        is_k = first + k < hidden
        is_in = is_row[:, None] & is_k[None, :]
        b = tl.load(
            matrix[None, :] + (first + k)[:, None],
            mask=is_k[:, None] & is_column[None, :],
            other=0.0,
        )
        a = tl.load(source[:, None] + (first + k)[None, :], mask=is_in, other=0.0)
        total = add_product(a, b, total, UPCAST)
        a = tl.load(other[:, None] + (first + k)[None, :], mask=is_in, other=0.0)
        other_total = add_product(a, b, other_total, UPCAST)
    return total.to(dtype).to(tl.float32), other_total.to(dtype).to(tl.float32)


@triton.jit
def _arg_max(values, ids):
    """Return the first id [rows] of the greatest of values [rows, ids], and the value.

    NaN is the greatest.
    """
    is_nan = values != values
    greatest = tl.max(tl.where(is_nan, -float("inf"), values), 1)
    nan_id = tl.min(tl.where(is_nan, ids[None, :], _NOWHERE), 1)
    best = tl.min(tl.where(values == greatest[:, None], ids[None, :], _NOWHERE), 1)
    has_nan = nan_id < _NOWHERE
    return tl.where(has_nan, nan_id, best), tl.where(has_nan, float("nan"), greatest)


@triton.jit
def _is_above(value, greatest):
    """Return True where `value` is the new greatest; the first of equals and the first NaN stay."""
    return (value > greatest) | ((value != value) & (greatest == greatest))


@triton.jit
def _join_tiles(
    bests,
    greatests,
    rests,
    seconds,
    moments,
    best_out,
    greatest_out,
    probability_out,
    second_out,
    entropy_out,
    num_rows,
    num_tiles,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    # Beyond the last row, the last row again.
    row = tl.minimum(tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R), num_rows - 1)
    tiles = tl.arange(0, BLOCK_T)
    places = row.to(tl.int64)[:, None] * num_tiles + tiles[None, :]
    is_tile = (tiles < num_tiles)[None, :]
    tile_greatest = tl.load(greatests + places, mask=is_tile, other=-float("inf"))
    winner, greatest = _arg_max(tile_greatest, tiles)
    is_winner = is_tile & (tiles[None, :] == winner[:, None])
    best = tl.sum(tl.load(bests + places, mask=is_winner, other=0), 1)
    below = tile_greatest - greatest[:, None]
    below = tl.where(below < _LEAST, _LEAST, below)  # a NaN stays
    weights = tl.exp(below)
    tile_rest = tl.load(rests + places, mask=is_tile, other=0.0)
    # The best itself is 1, and added where that is not lost.
    rest = tl.sum(weights * tl.where(is_winner, tile_rest, 1.0 + tile_rest), 1)
    total = 1.0 + rest.to(tl.float64)
    tl.store(best_out + row, best.to(tl.int64))
    tl.store(greatest_out + row, greatest)
    tl.store(probability_out + row, 1.0 / total)
    if second_out is not None:
        second = tl.load(seconds + places, mask=is_winner, other=-float("inf"))
        second = tl.max(tl.where(is_winner, second, tile_greatest), 1)
        tl.store(second_out + row, tl.exp(second - greatest) / total)
    if entropy_out is not None:
        moment = tl.load(moments + places, mask=is_tile, other=0.0)
        moment = tl.sum(weights * (moment + below * (1.0 + tile_rest)), 1)
        tl.store(entropy_out + row, tl.log(total) - moment / total)
