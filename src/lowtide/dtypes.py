"""Element types of stored weights, and conversion between them in numpy.

numpy has no bfloat16, so its bits travel as uint16. Imports no torch: reader threads use this.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.errors import UnsupportedError

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
"""Weight types that can be loaded, by their safetensors name."""

SAFETENSORS_NAME = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""From the names that configs and options use."""

MXFP4_BLOCK = 32
"""Weights that share a scale in MXFP4: four bits each (sign, two of exponent, one of mantissa;
the even ones in the low halves of bytes), times 2 ** (scale - 127), a scale of 255 being NaN
(OCP Microscaling Formats, version 1.0)."""

PACKED_DTYPE = "U8"
"""Of the tensors that hold the blocks and the scales of MXFP4 weights, by its safetensors name."""

_CHUNK_ELEMENTS = 1 << 18  # keeps the temporaries of a conversion inside the CPU's cache


def convert(
    source: NDArray[np.uint8], source_dtype: str, target: NDArray[np.uint8], target_dtype: str
) -> None:
    """Writes the elements in `source` bytes into `target` bytes, in another element type.

    Both are 1-D uint8 views of equally many elements. Narrowing rounds to nearest even.
    Raises UnsupportedError for types that are not in `ITEM_BYTES`.
    """
    for dtype in (source_dtype, target_dtype):
        if dtype not in ITEM_BYTES:
            raise UnsupportedError(
                f"Weights of type {dtype} cannot be loaded; supported: {', '.join(ITEM_BYTES)}."
            )
    if source_dtype == target_dtype:
        np.copyto(target, source)
        return
    source_step = _CHUNK_ELEMENTS * ITEM_BYTES[source_dtype]
    target_step = _CHUNK_ELEMENTS * ITEM_BYTES[target_dtype]
    num_chunks = -(-len(source) // source_step)
    for i in range(num_chunks):
        chunk = _to_float32(source[i * source_step : (i + 1) * source_step], source_dtype)
        _from_float32(chunk, target[i * target_step : (i + 1) * target_step], target_dtype)


def convert_rows(
    stored: NDArray[np.uint8],
    stored_dtype: str,
    scales: NDArray[np.uint8] | None,
    target: NDArray[Any],
    target_dtype: str,
) -> None:
    """Writes stored elements into an array of any strides, in the order of its axes.

    target [rows, ...]: bits of `target_dtype` as unsigned integers of its width. stored: bytes of
    as many elements of `stored_dtype`; or, with `scales`, the blocks of as many MXFP4 weights,
    a whole number of blocks in every row.
    """
    row_size = target[0].size
    num_rows = max(1, _CHUNK_ELEMENTS // row_size)
    for first in range(0, len(target), num_rows):
        rows = target[first : first + num_rows]
        start, stop = first * row_size, (first + len(rows)) * row_size
        if scales is None:
            item_bytes, dtype = ITEM_BYTES[stored_dtype], stored_dtype
            source = stored[start * item_bytes : stop * item_bytes]
        else:
            blocks = stored[start // 2 : stop // 2]
            dtype = "BF16"
            source = unpack_mxfp4(blocks, scales[start // MXFP4_BLOCK : stop // MXFP4_BLOCK])
        contiguous = np.empty(rows.shape, target.dtype)
        convert(source, dtype, contiguous.reshape(-1).view(np.uint8), target_dtype)
        rows[...] = contiguous


def unpack_mxfp4(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The bfloat16 bytes of MXFP4 weights: exact, but infinite beyond bfloat16's range.

    blocks [16 n], scales [n]; returns [64 n] bytes. See `MXFP4_BLOCK`.
    """
    index = scales.astype(np.uint16)[:, None] << 8 | blocks.reshape(len(scales), -1)
    return _mxfp4_pairs().take(index).reshape(-1).view(np.uint8)


@functools.cache
def _mxfp4_pairs() -> NDArray[np.uint32]:
    """Both bfloat16 weights of a byte, the low half's in the low bits, at scale * 256 + byte."""
    magnitudes = np.array((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
    scales = np.append(np.ldexp(1.0, np.arange(-127, 128)), np.nan)
    with np.errstate(over="ignore"):  # beyond bfloat16's range: infinity
        values = np.outer(scales, np.append(magnitudes, -magnitudes)).astype(np.float32)
    bits = values.view(np.uint32) >> 16  # nothing below them but zeros
    pairs = bits[:, None, :] | bits[:, :, None] << 16
    return pairs.astype(np.uint32, copy=False).reshape(-1)


def is_finite(source: NDArray[np.uint8], dtype: str) -> bool:
    """Whether no element (or, of `PACKED_DTYPE`, no scale) is an infinity or NaN."""
    if dtype == PACKED_DTYPE:
        return not bool((source == 255).any())
    if dtype == "F32":
        return bool(np.isfinite(source.view(np.float32)).all())
    exponent = np.uint16(0x7F80 if dtype == "BF16" else 0x7C00)
    return not bool(((source.view(np.uint16) & exponent) == exponent).any())


def _to_float32(source: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    # A tensor may start at any byte of a file, hence the copy where numpy wants alignment.
    if dtype == "BF16":
        return (source.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return source.view(np.float16 if dtype == "F16" else np.float32).astype(np.float32)


def _from_float32(source: NDArray[np.float32], target: NDArray[np.uint8], dtype: str) -> None:
    if dtype == "BF16":
        bits = source.view(np.uint32)
        rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
        rounded = np.where(np.isnan(source), np.uint32(0x7FC0), rounded)
        target.view(np.uint16)[:] = rounded.astype(np.uint16)
    else:
        with np.errstate(over="ignore"):  # beyond float16's range: infinity, as torch has it
            target.view(np.float16 if dtype == "F16" else np.float32)[:] = source
