"""Element types of stored weights, and conversion between them in numpy.

numpy has no bfloat16, so its bits travel as uint16. Imports no torch: reader threads use this.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lowtide.errors import UnsupportedError

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
"""Weight types that can be loaded, by their safetensors name."""

SAFETENSORS_NAME = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""From the names that configs and options use."""

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


def is_finite(source: NDArray[np.uint8], dtype: str) -> bool:
    """Whether no element is an infinity or NaN."""
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
