"""ggml types with 32 weights per block: one scale, perhaps an offset, and numbers.

Layouts and formulas: ggml's `ggml-common.h` and `dequantize_row_*`. The low nibbles of a block's
bytes are its first 16 weights, the high nibbles the others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.formats.matrix import Bytes

IQ4_VALUES = np.array(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.int8
)
"""Values of the sixteen codes of types with "non-linear" numbers."""

MXFP4_VALUES = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.int8)
"""Values of the sixteen codes of MXFP4, doubled, since the scale is halved."""

Weights = NDArray[np.float32]
Numbers = NDArray[np.int8]


class BlockGroups(NamedTuple):
    """Unpacked blocks: weight = scale * number - offset, in float32."""

    numbers: Numbers  # [blocks, groups, weights of a group]
    scales: Weights  # [blocks, groups]
    offsets: Weights | None = None

    def weights(self) -> Weights:
        """Compute the weights [blocks, groups, weights of a group]."""
        weights = self.scales[:, :, None] * self.numbers.astype(np.float32)
        if self.offsets is not None:
            weights -= self.offsets[:, :, None]
        return weights


_SCALE = ("d", "<f2")
_NUMBERS = ("q", "u1", 16)
_Q4_0 = np.dtype([_SCALE, _NUMBERS])
_Q4_1 = np.dtype([_SCALE, ("m", "<f2"), _NUMBERS])
_FIFTH_BITS = ("h", "u1", 4)
_Q5_0 = np.dtype([_SCALE, _FIFTH_BITS, _NUMBERS])
_Q5_1 = np.dtype([_SCALE, ("m", "<f2"), _FIFTH_BITS, _NUMBERS])
_Q8_0 = np.dtype([_SCALE, ("q", "i1", 32)])
_MXFP4 = np.dtype([("e", "u1"), _NUMBERS])


def float32(halves: NDArray[np.float16]) -> Weights:
    """Convert a field with one value per block to a float32 column."""
    return halves.astype(np.float32)[:, None]


def nibbles(q: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Unpack [..., n] bytes to [..., 2 n] nibbles: all low ones, then all high ones."""
    return np.concatenate((q & 15, q >> 4), axis=-1)


def nibble_pairs(q: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Unpack [blocks, n] bytes to [blocks, 2 n] nibbles: low and high of each byte in turn."""
    return np.stack((q & 15, q >> 4), axis=-1).reshape(-1, 2 * q.shape[1])


def minus_zero(numbers: NDArray[np.integer[Any]], zero: int = 0) -> Numbers:
    """Subtract `zero`, with a signed result."""
    return numbers.astype(np.int8) - np.int8(zero)


def _q4_0(stored: Bytes) -> BlockGroups:
    block = stored.view(_Q4_0)
    return _one_group(minus_zero(nibbles(block["q"]), 8), float32(block["d"]))


def _q4_1(stored: Bytes) -> BlockGroups:
    block = stored.view(_Q4_1)
    return _one_group(minus_zero(nibbles(block["q"])), float32(block["d"]), -float32(block["m"]))


def _q5_0(stored: Bytes) -> BlockGroups:
    block = stored.view(_Q5_0)
    return _one_group(minus_zero(_five_bits(block), 16), float32(block["d"]))


def _q5_1(stored: Bytes) -> BlockGroups:
    block = stored.view(_Q5_1)
    return _one_group(minus_zero(_five_bits(block)), float32(block["d"]), -float32(block["m"]))


def _five_bits(block: NDArray[np.void]) -> NDArray[np.integer[Any]]:
    fifth_bits = np.unpackbits(block["h"], axis=-1, bitorder="little")
    return nibbles(block["q"]) | fifth_bits << 4


def _q8_0(stored: Bytes) -> BlockGroups:
    block = stored.view(_Q8_0)
    return _one_group(block["q"], float32(block["d"]))


def _iq4_nl(stored: Bytes) -> BlockGroups:
    block = stored.view(_Q4_0)
    return _one_group(IQ4_VALUES.take(nibbles(block["q"])), float32(block["d"]))


def _mxfp4(stored: Bytes) -> BlockGroups:
    block = stored.view(_MXFP4)
    # 2 ** (e - 128); the two smallest are subnormal.
    exponents = block["e"].astype(np.uint32)
    bits = np.where(exponents < 2, np.uint32(1 << 21) << exponents, exponents - 1 << 23)
    scales = bits.astype(np.uint32).view(np.float32)[:, None]
    return _one_group(MXFP4_VALUES.take(nibbles(block["q"])), scales)


def _one_group(numbers: Numbers, scales: Weights, offsets: Weights | None = None) -> BlockGroups:
    """Make blocks with one group each from numbers [blocks, 32]."""
    return BlockGroups(numbers[:, None], scales, offsets)


TYPES = {
    "Q4_0": (_Q4_0, _q4_0),
    "Q4_1": (_Q4_1, _q4_1),
    "Q5_0": (_Q5_0, _q5_0),
    "Q5_1": (_Q5_1, _q5_1),
    "Q8_0": (_Q8_0, _q8_0),
    "IQ4_NL": (_Q4_0, _iq4_nl),
    "MXFP4": (_MXFP4, _mxfp4),
}
"""By type name: the fields of a block, and the function from 1-D bytes to groups."""
