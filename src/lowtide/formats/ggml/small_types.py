"""ggml's types of 32 weights to a block: one scale, perhaps an offset, and the weights' numbers.

Layouts and formulas: ggml's `ggml-common.h` and `dequantize_row_*`. The numbers of four bits lie
so that the low halves of a block's bytes are its first weights and the high halves the others.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lowtide.formats.matrix import Bytes

IQ4_VALUES = np.array(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.float32
)
"""Of the types with "non-linear" numbers of four bits."""

_MXFP4_VALUES = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.float32)
"""Doubled: the scale is halved."""

Weights = NDArray[np.float32]

_SCALE = ("d", "<f2")
_NUMBERS = ("q", "u1", 16)
_Q4_0 = np.dtype([_SCALE, _NUMBERS])
_Q4_1 = np.dtype([_SCALE, ("m", "<f2"), _NUMBERS])
_Q5_0 = np.dtype([_SCALE, ("h", "u1", 4), _NUMBERS])
_Q8_0 = np.dtype([_SCALE, ("q", "i1", 32)])
_MXFP4 = np.dtype([("e", "u1"), _NUMBERS])


def float32(halves: NDArray[np.float16]) -> Weights:
    """A column of what each block has once."""
    return halves.astype(np.float32)[:, None]


def nibbles(q: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[..., n] to [..., 2 n]: the low halves, then the high ones."""
    return np.concatenate((q & 15, q >> 4), axis=-1)


def _q4_0(stored: Bytes) -> Weights:
    block = stored.view(_Q4_0)
    return float32(block["d"]) * (nibbles(block["q"]).astype(np.float32) - 8)


def _q4_1(stored: Bytes) -> Weights:
    block = stored.view(_Q4_1)
    return float32(block["d"]) * nibbles(block["q"]).astype(np.float32) + float32(block["m"])


def _q5_0(stored: Bytes) -> Weights:
    block = stored.view(_Q5_0)
    fifth_bits = np.unpackbits(block["h"], axis=-1, bitorder="little")
    numbers = nibbles(block["q"]) | fifth_bits << 4
    return float32(block["d"]) * (numbers.astype(np.float32) - 16)


def _q8_0(stored: Bytes) -> Weights:
    block = stored.view(_Q8_0)
    return block["q"].astype(np.float32) * float32(block["d"])


def _iq4_nl(stored: Bytes) -> Weights:
    block = stored.view(_Q4_0)
    return float32(block["d"]) * IQ4_VALUES.take(nibbles(block["q"]))


def _mxfp4(stored: Bytes) -> Weights:
    block = stored.view(_MXFP4)
    # 2 ** (e - 128), of which the two least are below the normal numbers.
    exponents = block["e"].astype(np.uint32)
    bits = np.where(exponents < 2, np.uint32(1 << 21) << exponents, exponents - 1 << 23)
    scales = bits.astype(np.uint32).view(np.float32)[:, None]
    return scales * _MXFP4_VALUES.take(nibbles(block["q"]))


TYPES = {
    "Q4_0": (_Q4_0, _q4_0),
    "Q4_1": (_Q4_1, _q4_1),
    "Q5_0": (_Q5_0, _q5_0),
    "Q8_0": (_Q8_0, _q8_0),
    "IQ4_NL": (_Q4_0, _iq4_nl),
    "MXFP4": (_MXFP4, _mxfp4),
}
"""Of each name the fields of a block and what makes [blocks, 32] weights of 1-D bytes."""
