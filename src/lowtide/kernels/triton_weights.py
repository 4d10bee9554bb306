"""Tiles of weights in Triton: read as stored in a slot, unpacked where they are multiplied.

A tile is [depth, columns], some neighbours of some rows of a matrix [out, in], transposed. A plain
one is read in the compute dtype. A packed one is read as words of four bytes; a byte of 4-bit
weights has one weight of each half of a group. Each half makes a tile of its own, for which the
inputs are read in the same order, so that no byte is read twice and none moves between threads.
Each weight is unpacked in float32, as its format says, and rounded once to the compute dtype. The
bytes are those of `formats/quantised.py` and `formats/ggml`.
"""

from __future__ import annotations

import triton
import triton.language as tl

PLAIN = tl.constexpr("plain")
Q8, Q4, MXFP4 = tl.constexpr("q8"), tl.constexpr("q4"), tl.constexpr("MXFP4")

PACKED = (Q8.value, Q4.value, MXFP4.value)
"""Names of the formats whose tiles are unpacked here."""


@triton.constexpr_function
def num_halves(form):
    """Return the number of tiles that one read gives."""
    return 2 if form in (Q4.value, MXFP4.value) else 1


@triton.constexpr_function
def group_size(form):
    """Return the number of weights that share a scale."""
    return 32 if form == MXFP4.value else 64


@triton.constexpr_function
def unit_size(form):
    """Return the number of a group's codes in one half; they are neighbours in both."""
    return group_size(form) // num_halves(form)


@triton.jit
def depth_of_half(BLOCK_K: tl.constexpr, FORMAT: tl.constexpr):
    """Return the places of the first half's inputs in a block of BLOCK_K inputs.

    Those of the second half are one `unit_size` further.
    """
    HALVES: tl.constexpr = num_halves(FORMAT)
    k = tl.arange(0, BLOCK_K // HALVES)
    if HALVES > 1:
        UNIT: tl.constexpr = unit_size(FORMAT)
        k = k // UNIT * group_size(FORMAT) + k % UNIT
    return k


@triton.jit
def elements(place, dtype: tl.constexpr):
    """Cast a pointer into a slot, possibly one to bytes, to a pointer to `dtype`."""
    return place.to(tl.pointer_type(dtype), bitcast=True)


@triton.jit
def ahead(
    matrix,
    columns,
    is_column,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """Return the initial state of `take_tile`: in MXFP4 the first tile.

    The compiler copies later tiles of other formats into shared memory ahead of use. It would copy
    a block of 17 bytes 4 bytes at a time, which takes longer than computing with it.
    """
    if FORMAT == MXFP4:
        found = _load_words(matrix, columns, is_column, 0, BLOCK_K, FORMAT, LENGTH)
    else:
        found = 0.0, 0.0, 0.0
    return found


@triton.jit
def take_tile(
    held,
    matrix,
    columns,
    is_column,
    first,
    length,
    dtype: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """Read the codes, scales and zeros of weights `first` to `first + BLOCK_K` of rows `columns`.

    Also returns the state for the next call. length: weights of a row; LENGTH: the same for a
    packed one, a constant, so that the compiler knows the rows' alignment. Plain: the weights
    themselves. Packed: words [words, columns] and twice [groups, 1, columns].
    """
    if FORMAT == PLAIN:
        k = tl.arange(0, BLOCK_K)
        is_weight = (k < length - first)[:, None] & is_column[None, :]
        places = elements(matrix, dtype) + (columns[None, :] * length + k[:, None])
        found = tl.load(places + first, mask=is_weight, other=0.0), 0.0, 0.0
    else:
        GROUP: tl.constexpr = group_size(FORMAT)
        group = tl.multiple_of(first // GROUP, BLOCK_K // GROUP)
        if FORMAT == MXFP4:
            found = held
            group += BLOCK_K // GROUP
            held = _load_words(matrix, columns, is_column, group, BLOCK_K, FORMAT, LENGTH)
        else:
            found = _load_words(matrix, columns, is_column, group, BLOCK_K, FORMAT, LENGTH)
    return found, held


@triton.jit
def _load_words(
    matrix,
    columns,
    is_column,
    group,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    LENGTH: tl.constexpr,
):
    GROUP: tl.constexpr = group_size(FORMAT)
    GROUPS: tl.constexpr = (LENGTH + GROUP - 1) // GROUP
    BLOCK_G: tl.constexpr = BLOCK_K // GROUP
    WORDS: tl.constexpr = unit_size(FORMAT) // 4  # of a group
    word = tl.arange(0, BLOCK_G * WORDS)[:, None]
    own_group = tl.arange(0, BLOCK_G)[:, None, None]
    is_word, is_group = is_column[None, :], is_column[None, None, :]
    if FORMAT == MXFP4 or LENGTH % BLOCK_K:
        is_word = is_word & (group + word // WORDS < GROUPS)
        is_group = is_group & (group + own_group < GROUPS)
    if FORMAT == MXFP4:
        # Four blocks are 17 words, so what is computed of `columns` stays from step to step.
        base = matrix + group * 17
        block = (columns[None, None, :] * GROUPS + own_group) * 17
        scales = tl.load(base + block, mask=is_group, other=0)
        codes = (columns[None, :] * GROUPS + word // WORDS) * 17 + 1
        # A word that lies in two aligned ones, or is one: after the last of them a slot may end.
        places = elements(base, tl.uint32) + ((codes >> 2) + word % WORDS)
        low = tl.load(places, mask=is_word, other=0).to(tl.uint64)
        high = tl.load(places + ((codes & 3) != 0), mask=is_word, other=0).to(tl.uint64)
        words = ((high << 32 | low) >> ((codes & 3) * 8).to(tl.uint64)).to(tl.uint32)
        found = words, scales, scales
    else:
        ROW: tl.constexpr = GROUPS * (WORDS + 1)
        places = elements(matrix, tl.uint32) + (columns[None, :] * ROW + (group * WORDS + word))
        words = tl.load(places, mask=is_word, other=0)
        halves = elements(matrix, tl.float16)
        halves += columns[None, None, :] * (2 * ROW) + (2 * GROUPS * WORDS + group + own_group)
        scales = tl.load(halves, mask=is_group, other=0.0)
        found = words, scales, tl.load(halves + GROUPS, mask=is_group, other=0.0)
    return found


@triton.jit
def weights_of(
    tile, half: tl.constexpr, is_k, dtype: tl.constexpr, FORMAT: tl.constexpr, LENGTH: tl.constexpr
):
    """Unpack one half of a tile of `take_tile`, [depth, columns] in the compute dtype."""
    if FORMAT == PLAIN:
        found = tile[0]
    else:
        first = _unpacked(*tile, 0, half, FORMAT).to(dtype)
        second = _unpacked(*tile, 1, half, FORMAT).to(dtype)
        third = _unpacked(*tile, 2, half, FORMAT).to(dtype)
        fourth = _unpacked(*tile, 3, half, FORMAT).to(dtype)
        four = tl.join(tl.join(first, third), tl.join(second, fourth))  # [words, columns, 2, 2]
        DEPTH: tl.constexpr = 4 * first.shape[0]
        found = tl.reshape(tl.permute(four, (0, 2, 3, 1)), (DEPTH, first.shape[1]))
        if LENGTH % group_size(FORMAT):
            # Beyond a row's end codes mean nothing, and may be infinite in float16. Elsewhere
            # this would keep the compiler from reading each thread's words where it multiplies.
            found = tl.where(is_k[:, None], found, 0.0)
    return found


@triton.jit
def _unpacked(words, scales, zeros, byte: tl.constexpr, half: tl.constexpr, FORMAT: tl.constexpr):
    """Unpack one byte of each word into float32 weights [words, columns].

    Codes are not converted but placed, two at a time, in the bits of two float16: those of an
    integer in the lowest bits, which gives code * 2 ** -24 exactly, and so exact results.
    """
    WORDS: tl.constexpr = unit_size(FORMAT) // 4
    if FORMAT == MXFP4:
        PLACE: tl.constexpr = 8 * (byte % 2) + 4 * half
        numbers = _float16(_placed_fp4(words, PLACE), byte // 2) * 32768.0
        weights = numbers.to(tl.float32) * _spread(_power_of_two(scales), WORDS)
    else:
        LEFT: tl.constexpr = 4 * half
        MASK: tl.constexpr = (0x00FF00FF if FORMAT == Q8 else 0x000F000F) << LEFT
        numbers = _float16((words >> (8 * (byte % 2))) & MASK, byte // 2).to(tl.float32)
        LIFT: tl.constexpr = 2.0 ** (24 - LEFT)
        scales, zeros = scales.to(tl.float32) * LIFT, zeros.to(tl.float32)
        weights = numbers * _spread(scales, WORDS) + _spread(zeros, WORDS)
    return weights


@triton.jit
def _placed_fp4(words, PLACE: tl.constexpr):
    """Place the four bits at PLACE, and 16 further, as sign, exponent and mantissa of two float16.

    They are 2 ** -14 times the numbers.
    """
    signs = (words << (12 - PLACE)) & 0x80008000
    if PLACE <= 9:
        rest = words << (9 - PLACE)
    else:
        rest = words >> (PLACE - 9)
    return signs | (rest & 0x0E000E00)


@triton.jit
def _float16(words, upper: tl.constexpr):
    """Return the float16 number in the lower or upper half of a word."""
    return (words >> (16 * upper)).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _spread(numbers, WORDS: tl.constexpr):
    """Repeat [groups, 1, columns] to [groups * WORDS, columns]."""
    GROUPS: tl.constexpr = numbers.shape[0]
    COLUMNS: tl.constexpr = numbers.shape[2]
    spread = tl.broadcast_to(numbers, (GROUPS, WORDS, COLUMNS))
    return tl.reshape(spread, (GROUPS * WORDS, COLUMNS))


@triton.jit
def _power_of_two(exponents):
    """Return 2 ** (exponent - 128); the two least are subnormal numbers."""
    exponents = exponents.to(tl.int32)
    bits = tl.where(exponents < 2, (1 << 21) << exponents, (exponents - 1) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def add_product(a, b, total, UPCAST: tl.constexpr):
    """Return `total + a @ b`; a and b have one dtype, and are cast to float32 if UPCAST."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    # "ieee": float32 stays float32, not TF32.
    return tl.dot(a, b, total, input_precision="ieee")
