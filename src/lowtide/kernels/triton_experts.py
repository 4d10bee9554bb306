"""Gated MLPs of many experts at once in Triton, with weights in numbered slots.

Pairs of (token, expert) are sorted by expert. A tile is up to `BLOCK_M` pairs of one expert. One
small launch turns counts and slots into a table of tiles on the device, then two launches compute:

    gate[pair]  = silu(parts[pair] @ gate_e^T) * (parts[pair] @ up_e^T)
    parts[pair] = gate[pair] @ down_e^T

or, for clamped experts, with biases and `reference.clamped_swiglu`. Weights may be packed
(`triton_weights`). Products accumulate in float32 and are rounded where `Kernels.gated_mlp` rounds:
after each product, bias, SiLU and multiplication. Sums go in the order of the columns (of packed
ones one half of each group after the other), whatever the tile, so which experts share a launch
changes no bit.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.kernels.reference import CLAMP_LIMIT, CLAMP_SLOPE
from lowtide.kernels.triton_weights import (
    MXFP4,
    PLAIN,
    Q4,
    Q8,
    add_product,
    ahead,
    depth_of_half,
    elements,
    num_halves,
    take_tile,
    unit_size,
    weights_of,
)

_SMALL_TILE = 16
_LARGE_TILE = 64
TILE_SIZES = (_SMALL_TILE, _LARGE_TILE)
"""Pairs of a tile: the two sizes that `tile_rows` chooses from."""

# A block's shape depends on the tile alone, so that an expert's sums never depend on what runs
# beside it. Small tiles read each weight once, so what counts is bytes under way: one token's 8
# experts of LLaDA2.0-mini make 128 programs of the first launch, about one for each processor of a
# large GPU, with two stages of 16 KiB of weights under way in each. In float32 that is 80 KiB of
# shared memory with the inputs, of the 99 that a consumer GPU's block may have.
_NUM_STAGES = 3  # one computed, two in flight
_PLACED_ELEMENTS = 4096  # in flight in a program of `place_rows`
PLACED_ROWS = 16
"""Pairs of one program of `place_rows`."""

_LIMIT, _SLOPE = tl.constexpr(CLAMP_LIMIT), tl.constexpr(CLAMP_SLOPE)

# The interpreter multiplies bfloat16 wrongly, without an error.
_UPCAST = triton.knobs.runtime.interpret


class SlotImage(NamedTuple):
    """Offsets of an expert's parts in a slot.

    In elements of the compute dtype; in bytes if anything is packed.
    """

    stride: int  # from slot to slot
    gate: int  # [expert_size, hidden], rows adjacent
    up: int  # [expert_size, hidden]
    down: int  # [hidden, expert_size]
    biases: tuple[int, int, int] | None = None  # of clamped experts: gate's, up's and down's
    inward: str = PLAIN.value  # format of gate and up: the compute dtype, or one of `PACKED`
    outward: str = PLAIN.value  # format of down


class Tiles(NamedTuple):
    """Table of a launch's tiles, allocated for the most tiles and filled on the device.

    The first `num_tiles` of each tensor hold the slot of the tile's expert, its first pair and the
    pair after its last.
    """

    slot: Tensor  # [max_tiles] int32
    start: Tensor  # [max_tiles] int32
    stop: Tensor  # [max_tiles] int32
    num_tiles: Tensor  # [1] int32

    @classmethod
    def empty(cls, max_pairs: int, num_experts: int, device: torch.device) -> Tiles:
        """Allocate a table for steps of up to `max_pairs` pairs."""
        room = max_tiles(max_pairs, num_experts, _SMALL_TILE)
        slot, start, stop = torch.empty((3, room), dtype=torch.int32, device=device)
        return cls(slot, start, stop, torch.empty(1, dtype=torch.int32, device=device))


def tile_rows(num_pairs: int, num_experts: int) -> int:
    """Choose the pairs of a tile: few if experts have few pairs each, many if they have many.

    Depends only on the step's size, not on which experts are resident.
    """
    return _SMALL_TILE if num_pairs <= 2 * _SMALL_TILE * num_experts else _LARGE_TILE


def max_tiles(num_pairs: int, num_experts: int, rows: int) -> int:
    """Return the most tiles of `rows` pairs that `num_pairs` of `num_experts` experts can need."""
    return min(num_pairs, num_pairs // rows + num_experts)


def plan_tiles(counts: Tensor, slot_of: Tensor, rows: int, tiles: Tiles) -> None:
    """Fill `tiles` for the experts whose slot is not negative.

    counts [num_experts] int64: pairs of each expert; slot_of [num_experts] int32, on the device or
    in pinned host memory (it is read once, in place).
    """
    num_experts = len(counts)
    _plan_tiles[(1,)](
        counts,
        slot_of,
        *tiles,
        num_experts,
        BLOCK_M=rows,
        BLOCK_E=triton.next_power_of_2(num_experts),
    )


class Blocks(NamedTuple):
    """Block sizes of one program of a product, and its warps."""

    columns: int
    depth: int
    num_warps: int


def _blocks(columns: int, depth: int, num_warps: int = 4) -> dict[int, Blocks]:
    """Return the blocks of small tiles and of large ones; these are half as deep in every dtype."""
    small = Blocks(columns, depth, num_warps)
    return {_SMALL_TILE: small, _LARGE_TILE: Blocks(64, depth // 2, 4)}


# A product of 4 bits is one of either half, so as deep as others. Unpacking takes longer than
# reading: two warps put inputs in order for more of q8 and q4 each than four would, and a thread
# has two scales to copy ahead, 4 bytes, the least that are.
GATE_UP_BLOCKS = {
    PLAIN.value: _blocks(32, 128),
    Q8.value: _blocks(32, 256, 2),
    Q4.value: _blocks(32, 256, 2),
    MXFP4.value: _blocks(32, 256),
}
DOWN_BLOCKS = {
    PLAIN.value: _blocks(64, 128),
    Q8.value: _blocks(64, 256, 2),
    Q4.value: _blocks(64, 256, 2),
    MXFP4.value: _blocks(64, 256),
}
"""Block sizes by the format and the pairs of a tile."""


def gated_mlps(
    slots: Tensor,
    image: SlotImage,
    tiles: Tiles,
    max_tiles: int,
    rows: int,
    parts: Tensor,
    gate: Tensor,
) -> None:
    """Compute the gated MLPs of the planned tiles: `parts` from inputs to outputs, in place.

    slots [num_slots, image.stride] compute dtype, or uint8 if anything is packed; rows: pairs of a
    tile; max_tiles: a bound of the planned tiles, known on the host; parts [pairs, hidden]; gate
    [pairs, expert_size] scratch.
    """
    hidden, width = parts.shape[1], gate.shape[1]
    is_clamped = image.biases is not None
    gate_bias, up_bias, down_bias = image.biases or (0, 0, 0)
    blocks = GATE_UP_BLOCKS[image.inward][rows]
    _gate_up[(max_tiles, triton.cdiv(width, blocks.columns))](
        *(slots, image.stride, image.gate, image.up, gate_bias, up_bias, *tiles),
        *(parts, gate, hidden, width, is_clamped),
        **_settings(rows, blocks, image.inward, hidden),
    )
    blocks = DOWN_BLOCKS[image.outward][rows]
    _down[(max_tiles, triton.cdiv(hidden, blocks.columns))](
        *(slots, image.stride, image.down, down_bias, *tiles),
        *(gate, parts, hidden, width, is_clamped),
        **_settings(rows, blocks, image.outward, width),
    )


@cache
def _settings(rows: int, blocks: Blocks, form: str, length: int) -> dict[str, int | str]:
    return {
        "FORMAT": form,
        "LENGTH": 0 if form == PLAIN.value else length,
        "BLOCK_M": rows,
        "BLOCK_N": blocks.columns,
        "BLOCK_K": blocks.depth,
        "UPCAST": _UPCAST,
        "num_warps": blocks.num_warps,
        "num_stages": _NUM_STAGES,
    }


def place_rows(source: Tensor, pairs: Tensor, parts: Tensor) -> None:
    """Compute `parts[pair] = source[pair]` for `pairs` [a multiple of PLACED_ROWS] int32 >= 0.

    source [pairs, hidden] and pairs: on the device or in pinned host memory, which is then read in
    place, and only the rows of `pairs`.
    """
    hidden = parts.shape[1]
    block = min(_PLACED_ELEMENTS // PLACED_ROWS, triton.next_power_of_2(hidden))
    _place_rows[(len(pairs) // PLACED_ROWS, triton.cdiv(hidden, block))](
        source, pairs, parts, hidden, BLOCK_M=PLACED_ROWS, BLOCK_H=block
    )


@triton.jit
def _plan_tiles(
    counts,
    slot_of,
    slots,
    starts,
    stops,
    num_tiles,
    num_experts,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    experts = tl.arange(0, BLOCK_E)
    is_expert = experts < num_experts
    count = tl.load(counts + experts, mask=is_expert, other=0).to(tl.int32)
    slot = tl.load(slot_of + experts, mask=is_expert, other=-1)
    own_tiles = tl.where(slot >= 0, tl.cdiv(count, BLOCK_M), 0)
    first_tile = tl.cumsum(own_tiles, 0) - own_tiles
    start = tl.cumsum(count, 0) - count
    stop = start + count
    tl.store(num_tiles, tl.sum(own_tiles, 0))
    for i in range(tl.max(own_tiles, 0)):
        is_own = i < own_tiles
        tl.store(slots + first_tile + i, slot, mask=is_own)
        tl.store(starts + first_tile + i, start + i * BLOCK_M, mask=is_own)
        tl.store(stops + first_tile + i, tl.minimum(start + (i + 1) * BLOCK_M, stop), mask=is_own)


@triton.jit
def _gate_up(
    weights,
    slot_stride,
    gate_offset,
    up_offset,
    gate_bias,
    up_bias,
    slots,
    starts,
    stops,
    num_tiles,
    x,
    out,
    hidden,
    width,
    CLAMPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    LENGTH: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tile = tl.program_id(0)
    if tile >= tl.load(num_tiles):
        return
    dtype = x.dtype.element_ty
    start = tl.load(starts + tile)
    pairs = start.to(tl.int64) + tl.arange(0, BLOCK_M)
    is_pair = pairs < tl.load(stops + tile)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < width
    k = depth_of_half(BLOCK_K, FORMAT)
    UNIT: tl.constexpr = unit_size(FORMAT)
    slot = weights + tl.load(slots + tile).to(tl.int64) * slot_stride
    x_rows = x + pairs[:, None] * hidden + k[None, :]
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    gate_place, up_place = slot + gate_offset, slot + up_offset
    next_gate = ahead(gate_place, columns, is_column, BLOCK_K, FORMAT, LENGTH)
    next_up = ahead(up_place, columns, is_column, BLOCK_K, FORMAT, LENGTH)
    for first in range(0, hidden, BLOCK_K):
        gate_tile, next_gate = take_tile(
            next_gate, gate_place, columns, is_column, first, hidden, dtype, BLOCK_K, FORMAT, LENGTH
        )
        up_tile, next_up = take_tile(
            next_up, up_place, columns, is_column, first, hidden, dtype, BLOCK_K, FORMAT, LENGTH
        )
        for half in tl.static_range(num_halves(FORMAT)):
            is_k = k < hidden - first - half * UNIT
            is_in = is_pair[:, None] & is_k[None, :]
            a = tl.load(x_rows + first + half * UNIT, mask=is_in, other=0.0)
            b_gate = weights_of(gate_tile, half, is_k, dtype, FORMAT, LENGTH)
            gate = add_product(a, b_gate, gate, UPCAST)
            b_up = weights_of(up_tile, half, is_k, dtype, FORMAT, LENGTH)
            up = add_product(a, b_up, up, UPCAST)
    gate, up = _rounded(gate, dtype), _rounded(up, dtype)
    if CLAMPED:
        gate = _biased(gate, slot + gate_bias, columns, is_column, dtype)
        up = _biased(up, slot + up_bias, columns, is_column, dtype)
        product = _clamped_swiglu(gate, up, dtype)
    else:
        product = _rounded(_silu(gate, dtype) * up, dtype)
    is_out = is_pair[:, None] & is_column[None, :]
    tl.store(out + pairs[:, None] * width + columns[None, :], product.to(dtype), mask=is_out)


@triton.jit
def _down(
    weights,
    slot_stride,
    down_offset,
    down_bias,
    slots,
    starts,
    stops,
    num_tiles,
    x,
    out,
    hidden,
    width,
    CLAMPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    LENGTH: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tile = tl.program_id(0)
    if tile >= tl.load(num_tiles):
        return
    dtype = x.dtype.element_ty
    start = tl.load(starts + tile)
    pairs = start.to(tl.int64) + tl.arange(0, BLOCK_M)
    is_pair = pairs < tl.load(stops + tile)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < hidden
    k = depth_of_half(BLOCK_K, FORMAT)
    UNIT: tl.constexpr = unit_size(FORMAT)
    slot = weights + tl.load(slots + tile).to(tl.int64) * slot_stride
    x_rows = x + pairs[:, None] * width + k[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    place = slot + down_offset
    next_down = ahead(place, columns, is_column, BLOCK_K, FORMAT, LENGTH)
    for first in range(0, width, BLOCK_K):
        down_tile, next_down = take_tile(
            next_down, place, columns, is_column, first, width, dtype, BLOCK_K, FORMAT, LENGTH
        )
        for half in tl.static_range(num_halves(FORMAT)):
            is_k = k < width - first - half * UNIT
            is_in = is_pair[:, None] & is_k[None, :]
            a = tl.load(x_rows + first + half * UNIT, mask=is_in, other=0.0)
            b = weights_of(down_tile, half, is_k, dtype, FORMAT, LENGTH)
            total = add_product(a, b, total, UPCAST)
    total = _rounded(total, dtype)
    if CLAMPED:
        total = _biased(total, slot + down_bias, columns, is_column, dtype)
    is_out = is_pair[:, None] & is_column[None, :]
    tl.store(out + pairs[:, None] * hidden + columns[None, :], total.to(dtype), mask=is_out)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)


@triton.jit
def _silu(x, dtype: tl.constexpr):
    return _rounded(x / (1.0 + tl.exp(-x)), dtype)


@triton.jit
def _biased(x, place, columns, is_column, dtype: tl.constexpr):
    bias = tl.load(elements(place, dtype) + columns, mask=is_column, other=0.0)
    return _rounded(x + bias.to(tl.float32)[None, :], dtype)


@triton.jit
def _clamped_swiglu(gate, up, dtype: tl.constexpr):
    # By comparisons, of which a NaN passes none.
    gate = _rounded(tl.where(gate > _LIMIT, _LIMIT, gate) * _SLOPE, dtype)
    up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up))
    product = _rounded(_silu(gate, dtype) * _rounded(up + 1.0, dtype), dtype)
    return _rounded(product / _SLOPE, dtype)


@triton.jit
def _place_rows(source, pairs, out, hidden, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr):
    pair = tl.load(pairs + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_in = (pair >= 0)[:, None] & (columns < hidden)[None, :]
    offset = pair[:, None] * hidden + columns[None, :]
    # All at once: reading one row from the host takes as long as reading all.
    tl.store(out + offset, tl.load(source + offset, mask=is_in), mask=is_in)
