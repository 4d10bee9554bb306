"""ggml types with 256 weights per block, whose scales of 16 or 32 weights are quantised, too.

Layouts and formulas: ggml's `ggml-common.h` and `dequantize_row_*`. Numbers of two or four bits are
stored so that adjacent weights are at the same bits of adjacent bytes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lowtide.formats.ggml.small_types import (
    IQ4_VALUES,
    BlockGroups,
    float32,
    minus_zero,
    nibble_pairs,
    nibbles,
)
from lowtide.formats.matrix import Bytes

_D, _M = ("d", "<f2"), ("m", "<f2")
_Q2_K = np.dtype([("s", "u1", 16), ("q", "u1", 64), _D, _M])
_Q3_K = np.dtype([("h", "u1", 32), ("q", "u1", 64), ("s", "u1", 12), _D])
_Q4_K = np.dtype([_D, _M, ("s", "u1", 12), ("q", "u1", 128)])
_Q5_K = np.dtype([_D, _M, ("s", "u1", 12), ("h", "u1", 32), ("q", "u1", 128)])
_Q6_K = np.dtype([("q", "u1", 128), ("h", "u1", 64), ("s", "i1", 16), _D])
_IQ4_XS = np.dtype([_D, ("t", "<u2"), ("s", "u1", 4), ("q", "u1", 128)])

Bits = NDArray[np.uint8]


def _q2_k(stored: Bytes) -> BlockGroups:
    block = stored.view(_Q2_K)
    scales = float32(block["d"]) * (block["s"] & 15).astype(np.float32)
    offsets = float32(block["m"]) * (block["s"] >> 4).astype(np.float32)
    numbers = _bit_layers(block["q"], 32, 2).reshape(-1, 16, 16)
    return BlockGroups(minus_zero(numbers), scales, offsets)


def _q3_k(stored: Bytes) -> BlockGroups:
    block = stored.view(_Q3_K)
    low, high = block["s"][:, :8], block["s"][:, 8:]
    six_bits = nibbles(low) | _bit_layers(high, 4, 2).reshape(-1, 16) << 4
    scales = float32(block["d"]) * (six_bits.astype(np.float32) - 32)
    # A third bit that is not set takes 4 away.
    third_bits = _bit_layers(block["h"], 32, 1).reshape(-1, 16, 16)
    numbers = _bit_layers(block["q"], 32, 2).reshape(-1, 16, 16) | third_bits << 2
    return BlockGroups(minus_zero(numbers, 4), scales)


def _q4_k(stored: Bytes) -> BlockGroups:
    block = stored.view(_Q4_K)
    return _with_offsets(block, _bit_layers(block["q"], 32, 4).reshape(-1, 8, 32))


def _q5_k(stored: Bytes) -> BlockGroups:
    block = stored.view(_Q5_K)
    fifth_bits = _bit_layers(block["h"], 32, 1).reshape(-1, 8, 32)
    low_bits = _bit_layers(block["q"], 32, 4).reshape(-1, 8, 32)
    return _with_offsets(block, low_bits | fifth_bits << np.uint8(4))


def _q6_k(stored: Bytes) -> BlockGroups:
    block = stored.view(_Q6_K)
    scales = float32(block["d"]) * block["s"].astype(np.float32)
    low = _bit_layers(block["q"], 64, 4).reshape(-1, 16, 16)
    high = _bit_layers(block["h"], 32, 2).reshape(-1, 16, 16)
    return BlockGroups(minus_zero(low | high << 4, 32), scales)


def _iq4_xs(stored: Bytes) -> BlockGroups:
    block = stored.view(_IQ4_XS)
    high = block["t"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = float32(block["d"]) * ((nibble_pairs(block["s"]) | high << 4).astype(np.float32) - 32)
    return BlockGroups(IQ4_VALUES.take(nibbles(block["q"].reshape(-1, 8, 16))), scales)


def _with_offsets(block: NDArray[np.void], numbers: Bits) -> BlockGroups:
    """Build groups of numbers [blocks, 8, 32] with six-bit scales and offsets."""
    low, middle, high = block["s"][:, :4], block["s"][:, 4:8], block["s"][:, 8:]
    sixes = np.concatenate((low & 63, high & 15 | (low >> 6) << 4), axis=-1)
    minus = np.concatenate((middle & 63, high >> 4 | (middle >> 6) << 4), axis=-1)
    scales = float32(block["d"]) * sixes.astype(np.float32)
    return BlockGroups(minus_zero(numbers), scales, float32(block["m"]) * minus.astype(np.float32))


def _bit_layers(q: Bits, length: int, num_bits: int) -> Bits:
    """Unpack bit layers: [blocks, n] to [blocks, n / length, 8 / num_bits, length].

    The lowest bits of each `length` bytes come first.
    """
    shifts = np.arange(0, 8, num_bits, dtype=np.uint8)[:, None]
    return q.reshape(len(q), -1, 1, length) >> shifts & np.uint8((1 << num_bits) - 1)


TYPES = {
    "Q2_K": (_Q2_K, _q2_k),
    "Q3_K": (_Q3_K, _q3_k),
    "Q4_K": (_Q4_K, _q4_k),
    "Q5_K": (_Q5_K, _q5_k),
    "Q6_K": (_Q6_K, _q6_k),
    "IQ4_XS": (_IQ4_XS, _iq4_xs),
}
"""By type name: the fields of a block, and the function from 1-D bytes to groups."""
