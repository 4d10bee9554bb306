"""Tiles of weights in Triton: read as a slot has them, unpacked where they are multiplied with.

A tile is [depth, columns], some neighbours of some rows of a matrix [out, in], transposed. A plain
one is read in the compute dtype. A packed one is read as codes, of which a byte of 4 bits has two
of a group's halves; each half makes a tile of its own, for which the inputs are read in the same
order, so that no byte is read twice and none is moved. Each weight is unpacked in float32, as its
format says, and rounded once to the compute dtype. The bytes are those of `formats/quantised.py`
and `formats/ggml`.
"""

from __future__ import annotations

import triton
import triton.language as tl

PLAIN = tl.constexpr("plain")
Q8, Q4, MXFP4 = tl.constexpr("q8"), tl.constexpr("q4"), tl.constexpr("MXFP4")

PACKED = (Q8.value, Q4.value, MXFP4.value)
"""Names of the formats of which tiles are unpacked here."""


@triton.constexpr_function
def num_halves(form):
    """Tiles that one reading gives."""
    return 2 if form in (Q4.value, MXFP4.value) else 1


@triton.constexpr_function
def group_size(form):
    """Weights that share a scale."""
    return 32 if form == MXFP4.value else 64


def row_groups(length: int, form: str) -> int:
    """Groups of a row of so many weights; of plain ones none are asked for."""
    return 0 if form == PLAIN.value else triton.cdiv(length, group_size(form))


@triton.constexpr_function
def unit_size(form):
    """Codes of a group in one half: neighbours in both."""
    return group_size(form) // num_halves(form)


@triton.jit
def depth_of_half(BLOCK_K: tl.constexpr, FORMAT: tl.constexpr):
    """Where, in a block of BLOCK_K inputs, those of the first half are; of the second, one
    `unit_size` further."""
    HALVES: tl.constexpr = num_halves(FORMAT)
    k = tl.arange(0, BLOCK_K // HALVES)
    if HALVES > 1:
        UNIT: tl.constexpr = unit_size(FORMAT)
        k = k // UNIT * group_size(FORMAT) + k % UNIT
    return k


@triton.jit
def elements(place, dtype: tl.constexpr):
    """A place in a slot, which may be one of bytes, as one of numbers."""
    return place.to(tl.pointer_type(dtype), bitcast=True)


@triton.jit
def load_tile(
    matrix,
    columns,
    is_column,
    first,
    length,
    dtype: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Weights `first` to `first + BLOCK_K` of rows `columns` of a matrix: codes, scales, zeros.

    length: weights of a row; GROUPS: groups of one, a constant, so that the compiler knows how
    rows are aligned. Plain: the weights themselves. Packed: [groups, unit, columns] and
    twice [groups, 1, columns].
    """
    if FORMAT == PLAIN:
        k = tl.arange(0, BLOCK_K)
        is_weight = (k < length - first)[:, None] & is_column[None, :]
        places = elements(matrix, dtype) + (columns[None, :] * length + k[:, None])
        found = tl.load(places + first, mask=is_weight, other=0.0), 0.0, 0.0
    else:
        GROUP: tl.constexpr = group_size(FORMAT)
        group = (first // GROUP + tl.arange(0, BLOCK_K // GROUP))[:, None, None]
        found = _load_groups(matrix, columns, is_column, group, GROUPS, FORMAT)
    return found


@triton.jit
def _load_groups(matrix, columns, is_column, group, GROUPS: tl.constexpr, FORMAT: tl.constexpr):
    UNIT: tl.constexpr = unit_size(FORMAT)
    columns = columns[None, None, :]
    unit = tl.arange(0, UNIT)[None, :, None]
    is_group = (group < GROUPS) & is_column[None, None, :]
    if FORMAT == MXFP4:
        blocks = matrix + (columns * GROUPS + group) * (UNIT + 1)
        codes = tl.load(blocks + 1 + unit, mask=is_group, other=0)
        found = codes, _power_of_two(tl.load(blocks, mask=is_group, other=0)), 0.0
    else:
        rows = matrix + columns * (GROUPS * (UNIT + 4))
        codes = tl.load(rows + group * UNIT + unit, mask=is_group, other=0)
        halves = elements(rows + GROUPS * UNIT, tl.float16)
        scales = tl.load(halves + group, mask=is_group, other=0.0)
        zeros = tl.load(halves + GROUPS + group, mask=is_group, other=0.0)
        found = codes, scales.to(tl.float32), zeros.to(tl.float32)
    return found


@triton.jit
def weights_of(tile, half: tl.constexpr, is_k, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """One half of what `load_tile` has read, [depth, columns] in the compute dtype."""
    if FORMAT == PLAIN:
        found = tile[0]
    else:
        weights = _unpacked(*tile, half, FORMAT).to(dtype)
        depth: tl.constexpr = weights.shape[0] * weights.shape[1]
        # Beyond a row's end codes mean nothing, and may be infinite in float16.
        found = tl.where(is_k[:, None], tl.reshape(weights, (depth, weights.shape[2])), 0.0)
    return found


@triton.jit
def _unpacked(codes, scales, zeros, half: tl.constexpr, FORMAT: tl.constexpr):
    if FORMAT == Q8:
        weights = codes.to(tl.float32) * scales + zeros
    else:
        codes = (codes >> (4 * half)) & 15
        if FORMAT == Q4:
            weights = codes.to(tl.float32) * scales + zeros
        else:
            weights = _doubled_fp4(codes.to(tl.int32)).to(tl.float32) * scales
    return weights


@triton.jit
def _power_of_two(exponents):
    """2 ** (exponent - 128), of which the two least are below the normal numbers."""
    exponents = exponents.to(tl.int32)
    bits = tl.where(exponents < 2, (1 << 21) << exponents, (exponents - 1) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _doubled_fp4(codes):
    """Twice the numbers of a sign, two bits of exponent and one of mantissa, as integers."""
    low, exponent = codes & 1, (codes >> 1) & 3
    number = tl.where(exponent == 0, low, (2 + low) << tl.maximum(exponent - 1, 0))
    return tl.where(codes >= 8, -number, number)


@triton.jit
def add_product(a, b, total, UPCAST: tl.constexpr):
    """total + a @ b, of rows and weights alike; in float32 where UPCAST says so."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    # "ieee": float32 stays float32, not TF32.
    return tl.dot(a, b, total, input_precision="ieee")
