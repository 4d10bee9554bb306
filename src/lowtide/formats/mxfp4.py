"""MXFP4 of the OCP Microscaling Formats, version 1.0, as gpt-oss's experts are published.

32 neighbouring weights share a scale: four bits each (sign, two of exponent, one of mantissa; the
even ones in the low halves of bytes), times 2 ** (scale - 127), a scale of 255 being NaN.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from lowtide.formats.matrix import Bytes, MatrixFormat

BLOCK = 32
"""Weights that share a scale."""

TENSOR_DTYPE = "U8"
"""Of the tensors that hold blocks and scales, by its safetensors name."""


class Mxfp4(MatrixFormat):
    """A tensor of blocks and one of scales; unpacked when it is read."""

    name = "MXFP4"
    dtypes = (TENSOR_DTYPE, TENSOR_DTYPE)
    block_size = BLOCK
    block_bytes = (BLOCK // 2, 1)
    unpacked = "BF16"

    def unpack(self, *stored: Bytes) -> Bytes:
        """Exact, but infinite beyond bfloat16's range. stored: blocks [16 n], scales [n]."""
        blocks, scales = stored
        index = scales.astype(np.uint16)[:, None] << 8 | blocks.reshape(len(scales), -1)
        return _pairs().take(index).reshape(-1).view(np.uint8)

    def has_tensor(self, name: str, dtype: str) -> bool:
        return dtype == TENSOR_DTYPE and name.endswith("_scales")

    def is_finite(self, stored: Bytes) -> bool:
        return not bool((stored == 255).any())


FORMATS = (Mxfp4(),)


@functools.cache
def _pairs() -> NDArray[np.uint32]:
    """Both bfloat16 weights of a byte, the low half's in the low bits, at scale * 256 + byte."""
    magnitudes = np.array((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
    scales = np.append(np.ldexp(1.0, np.arange(-127, 128)), np.nan)
    with np.errstate(over="ignore"):  # beyond bfloat16's range: infinity
        values = np.outer(scales, np.append(magnitudes, -magnitudes)).astype(np.float32)
    bits = values.view(np.uint32) >> 16  # nothing below them but zeros
    pairs = bits[:, None, :] | bits[:, :, None] << 16
    return pairs.astype(np.uint32, copy=False).reshape(-1)
