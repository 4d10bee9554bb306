"""Plain formats: bfloat16, float16 and float32.

numpy has no bfloat16, so its bits are held as uint16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lowtide.formats.matrix import Bytes, MatrixFormat

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
"""Bytes per weight, by safetensors' name."""

SAFETENSORS_NAME = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""Format names by the names of configs and options."""

CHUNK_WEIGHTS = 1 << 18
"""Weights converted at a time, so that temporaries fit into the CPU's cache."""


class PlainFormat(MatrixFormat):
    """Elements one after the other."""

    def __init__(self, name: str) -> None:
        self.name = self.unpacked = name
        self.dtypes = (name,)
        self.block_bytes = (ITEM_BYTES[name],)

    def unpack(self, *stored: Bytes) -> Bytes:
        return stored[0]

    def has_tensor(self, name: str, dtype: str) -> bool:
        return dtype == self.name

    def is_finite(self, stored: Bytes) -> bool:
        if self.name == "F32":
            return bool(np.isfinite(stored.view(np.float32)).all())
        exponent = np.uint16(0x7F80 if self.name == "BF16" else 0x7C00)
        return not bool(((stored.view(np.uint16) & exponent) == exponent).any())


FORMATS = tuple(map(PlainFormat, ITEM_BYTES))


def plain_format(dtype: torch.dtype) -> PlainFormat:
    """Return the format of matrices in a compute dtype."""
    name = SAFETENSORS_NAME[str(dtype).removeprefix("torch.")]
    return next(each for each in FORMATS if each.name == name)


def convert_plain(source: Bytes, source_name: str, target: Bytes, target_name: str) -> None:
    """Convert the elements in `source` bytes to another plain format in `target` bytes.

    Both are 1-D uint8 views of an equal number of elements. Narrowing rounds to nearest even.
    """
    if source_name == target_name:
        np.copyto(target, source)
        return
    source_step = CHUNK_WEIGHTS * ITEM_BYTES[source_name]
    target_step = CHUNK_WEIGHTS * ITEM_BYTES[target_name]
    num_chunks = -(-len(source) // source_step)
    for i in range(num_chunks):
        chunk = _to_float32(source[i * source_step : (i + 1) * source_step], source_name)
        _from_float32(chunk, target[i * target_step : (i + 1) * target_step], target_name)


def _to_float32(source: Bytes, name: str) -> NDArray[np.float32]:
    # A tensor may start at any byte of a file, hence the copy where numpy wants alignment.
    if name == "BF16":
        return (source.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return source.view(np.float16 if name == "F16" else np.float32).astype(np.float32)


def _from_float32(source: NDArray[np.float32], target: Bytes, name: str) -> None:
    if name == "BF16":
        bits = source.view(np.uint32)
        rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
        rounded = np.where(np.isnan(source), np.uint32(0x7FC0), rounded)
        target.view(np.uint16)[:] = rounded.astype(np.uint16)
    else:
        with np.errstate(over="ignore"):  # beyond float16's range: infinity, as torch has it
            target.view(np.float16 if name == "F16" else np.float32)[:] = source
