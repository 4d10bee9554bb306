"""FP8 by blocks, as published for DeepSeek-V3 and Qwen3.

A matrix [out, in] is its weights in float8_e4m3fn and a scale for each block of 128 by 128 (smaller
at the edges): `weight` and `weight_scale_inv` [out / 128, in / 128], rounded up; weight = number *
scale in float32. In memory the two follow each other.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lowtide.formats.arranged import Arranged, Floats, Sectioned, Shape, StoredTensor, to_float32
from lowtide.formats.matrix import Bytes
from lowtide.formats.plain import ITEM_BYTES

BLOCK = 128

DTYPE = "F8_E4M3"
"""The safetensors dtype of the weights."""

SCALE_DTYPES = ("F32", "BF16")


class Fp8Blocks(Sectioned):
    """FP8 blocks in memory."""

    def __init__(self, scale_dtype: str) -> None:
        self.scale_dtype = scale_dtype
        self.name = f"FP8 by blocks with a {scale_dtype} scale"
        self.dtypes = (self.name,)

    def sections(self, shape: Shape) -> tuple[Shape, ...]:
        out, width = shape
        return (out, width), (-(-out // BLOCK), -(-width // BLOCK) * ITEM_BYTES[self.scale_dtype])

    def weights(self, sections: Sequence[Bytes], rows: NDArray[np.int64], width: int) -> Floats:
        numbers = _numbers().take(sections[0])
        scales = to_float32(sections[1], self.scale_dtype)[rows // BLOCK]
        with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaN are kept
            numbers *= scales.repeat(BLOCK, axis=1)[:, :width]
        return numbers


class Fp8Checkpoint(Arranged):
    """FP8 blocks in a checkpoint. A unit is a row of blocks."""

    def __init__(self, scale_dtype: str) -> None:
        self.in_memory = Fp8Blocks(scale_dtype)
        self.scale_dtype = scale_dtype
        self.name = f"FP8 of 128 by 128 to a {scale_dtype} scale"
        self.dtypes = (self.name,)

    def num_units(self, shape: Shape) -> int:
        return -(-shape[0] // BLOCK)

    def tensors(self, shape: Shape) -> tuple[StoredTensor, ...]:
        out, width = shape
        blocks = (-(-out // BLOCK), -(-width // BLOCK))
        scale_bytes = blocks[1] * ITEM_BYTES[self.scale_dtype]
        return (
            StoredTensor(".weight", DTYPE, shape, BLOCK * width),
            StoredTensor(".weight_scale_inv", self.scale_dtype, blocks, scale_bytes),
        )

    def arrange_units(
        self, stored: Sequence[Bytes], shape: Shape, units: range, sections: Sequence[Bytes]
    ) -> None:
        for section, part, first in zip(
            sections, stored, (units.start * BLOCK, units.start), strict=True
        ):
            rows = part.reshape(-1, section.shape[1])
            section[first : first + len(rows)] = rows


FORMATS = {dtype: Fp8Checkpoint(dtype) for dtype in SCALE_DTYPES}


def nearest(values: Floats) -> Bytes:
    """Return the nearest float8_e4m3fn numbers, as bytes; those beyond the largest are that."""
    sizes = _numbers()[:127]  # 0 to 448
    found: Bytes = np.searchsorted((sizes[1:] + sizes[:-1]) / 2, np.abs(values)).astype(np.uint8)
    found[np.signbit(values)] |= 128
    return found


@functools.cache
def _numbers() -> Floats:
    """Return the float8_e4m3fn value of every byte.

    Four bits of exponent (bias 7), three of mantissa; all ones are NaN, and there is no infinity.
    """
    bits = np.arange(256)
    sign = np.where(bits < 128, 1.0, -1.0)
    exponent, mantissa = bits >> 3 & 15, (bits & 7) / 8
    size = np.where(exponent, np.ldexp(1 + mantissa, exponent - 7), np.ldexp(mantissa, -6))
    found: Floats = (sign * np.where(bits & 127 == 127, np.nan, size)).astype(np.float32)
    return found
