"""MXFP4 of the OCP Microscaling Formats, version 1.0, as published for gpt-oss's experts.

32 adjacent weights share a scale: four bits each (sign, two of exponent, one of mantissa; the even
ones in the low nibbles), times 2 ** (scale - 127). A scale of 255 is NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lowtide.errors import CheckpointError
from lowtide.formats.ggml import FORMATS as GGML_FORMATS
from lowtide.formats.ggml import MXFP4
from lowtide.formats.matrix import Bytes, MatrixFormat
from lowtide.formats.plain import CHUNK_WEIGHTS

BLOCK = 32
"""Weights per scale."""

[GGML_MXFP4] = [each for each in GGML_FORMATS if each.ggml_name == MXFP4]

NAME = "MXFP4 blocks"
"""Name of the stored format; in memory it is `MXFP4`."""

TENSOR_DTYPE = "U8"
"""The safetensors dtype of the tensors with blocks and scales."""


_KEPT = np.dtype([("scale", "u1"), ("weights", "V16")])
_CHUNK_BLOCKS = CHUNK_WEIGHTS // BLOCK
_LOW_HALVES, _HALF = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(4)


class Mxfp4(MatrixFormat):
    """MXFP4 as a tensor of blocks and one of scales.

    Kept as in GGUF files, with each block's scale before its weights (`formats/ggml`), in as many
    bytes.
    """

    name = NAME
    dtypes = (TENSOR_DTYPE, TENSOR_DTYPE)
    block_size = BLOCK
    block_bytes = (BLOCK // 2, 1)
    unpacked = "BF16"

    @property
    def kept(self) -> MatrixFormat:
        return GGML_MXFP4

    def arrange(self, stored: Sequence[Bytes], target: Bytes) -> None:
        """Write blocks as GGUF has them, where weights k and k + 16 share a byte.

        Here they are in bytes k / 2 and k / 2 + 8. Raises CheckpointError, without the matrix's
        name, for a scale of 255: GGUF blocks have no NaN.
        """
        blocks, scales = stored
        if not self.is_finite(scales):
            raise CheckpointError("a scale of its blocks is 255, which is NaN in MXFP4")
        words, out = blocks.view(np.uint64).reshape(-1, 2), target.view(_KEPT)
        for start in range(0, len(scales), _CHUNK_BLOCKS):
            chunk = slice(start, start + _CHUNK_BLOCKS)
            first, second = words[chunk].T
            even = first & _LOW_HALVES | (second & _LOW_HALVES) << _HALF
            odd = first >> _HALF & _LOW_HALVES | second & ~_LOW_HALVES
            pairs = odd.view(np.uint8).astype(np.uint16)
            pairs <<= np.uint16(8)
            pairs |= even.view(np.uint8)
            out["scale"][chunk] = scales[chunk]
            out["weights"][chunk] = pairs.view("V16")

    def unpack(self, *stored: Bytes) -> Bytes:
        """Unpack exactly, with infinity beyond bfloat16's range.

        stored: blocks [16 n], scales [n].
        """
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
    """Return both bfloat16 weights of a byte, low nibble first, at index scale * 256 + byte."""
    magnitudes = np.array((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
    scales = np.append(np.ldexp(1.0, np.arange(-127, 128)), np.nan)
    with np.errstate(over="ignore"):  # beyond bfloat16's range: infinity
        values = np.outer(scales, np.append(magnitudes, -magnitudes)).astype(np.float32)
    bits = values.view(np.uint32) >> 16  # nothing below them but zeros
    pairs = bits[:, None, :] | bits[:, :, None] << 16
    return pairs.astype(np.uint32, copy=False).reshape(-1)
