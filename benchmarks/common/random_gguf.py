"""Writes GGUF files of random weights in a published shape, a tensor at a time.

Blocks of packed types are drawn as they are stored. Needs the `gguf` package.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.model_writing.safetensors_writer import check_disk_space

WEIGHT = 0.02
"""Standard deviation of weights."""

Draw = Callable[[np.random.Generator, int], NDArray[np.uint8]]
"""Draws a number of blocks, [blocks, bytes of one]."""


class FileTensor(NamedTuple):
    """A tensor of a file: its type and its shape, the last dimension packed."""

    name: str
    kind: str
    shape: tuple[int, ...]


Content = Callable[[FileTensor, np.random.Generator], NDArray[Any]]
"""Draws a tensor of float32."""


def write_random_gguf(
    target: Path,
    architecture: str,
    tensors: Iterable[FileTensor],
    write_settings: Callable[[Any], None],
    content: Content,
    seed: int = 0,
) -> Path:
    """Write the file once. Raises ImportError without `gguf`, StorageError for a small disk.

    write_settings: writes the metadata with a `GGUFWriter`. content: of tensors in float32.
    """
    import gguf

    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    tensors = list(tensors)
    check_disk_space(target.parent, sum(_num_bytes(each) for each in tensors) * 51 // 50)
    partial = target.with_suffix(".part")
    writer = gguf.GGUFWriter(partial, architecture)
    write_settings(writer)
    for each in tensors:
        block, block_bytes = _blocks(each.kind)
        is_plain = each.kind == "F32"
        packed = (*each.shape[:-1], each.shape[-1] // block * block_bytes)
        writer.add_tensor_info(
            each.name,
            each.shape if is_plain else packed,
            np.dtype(np.float32 if is_plain else np.uint8),
            _num_bytes(each),
            raw_dtype=gguf.GGMLQuantizationType[each.kind],
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(seed)
    for each in tensors:
        if each.kind == "F32":
            writer.write_tensor_data(content(each, rng))
        else:
            num_blocks = _num_bytes(each) // _blocks(each.kind)[1]
            writer.write_tensor_data(_PACKED[each.kind](rng, num_blocks).ravel())
    writer.close()
    os.replace(partial, target)
    return target


def _blocks(kind: str) -> tuple[int, int]:
    """Weights of a block, and its bytes."""
    import gguf

    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return int(block), int(block_bytes)


def _num_bytes(tensor: FileTensor) -> int:
    block, block_bytes = _blocks(tensor.kind)
    return math.prod(tensor.shape) // block * block_bytes


def _halves(count: int, scale: float) -> NDArray[np.uint8]:
    """Return `count` copies of a scale as the bytes of float16."""
    return np.full((count, 1), scale, np.float16).view(np.uint8)


def _q8_0(rng: np.random.Generator, count: int) -> NDArray[np.uint8]:
    weights = rng.integers(0, 256, (count, 32), np.uint8)
    return np.concatenate([_halves(count, WEIGHT / 74), weights], 1)


def _q4_0(rng: np.random.Generator, count: int) -> NDArray[np.uint8]:
    weights = rng.integers(0, 256, (count, 16), np.uint8)
    return np.concatenate([_halves(count, WEIGHT / 4.6), weights], 1)


def _q4_k(rng: np.random.Generator, count: int) -> NDArray[np.uint8]:
    rest = rng.integers(0, 256, (count, 140), np.uint8)
    scale = WEIGHT / 257
    return np.concatenate([_halves(count, scale), _halves(count, 7.5 * scale), rest], 1)


def _q6_k(rng: np.random.Generator, count: int) -> NDArray[np.uint8]:
    weights = rng.integers(0, 256, (count, 192), np.uint8)
    scales = rng.integers(32, 96, (count, 16), np.uint8)
    return np.concatenate([weights, scales, _halves(count, WEIGHT / 1220)], 1)


def _mxfp4(rng: np.random.Generator, count: int) -> NDArray[np.uint8]:
    exponent = 127 + round(math.log2(WEIGHT / 2.9))
    weights = rng.integers(0, 256, (count, 16), np.uint8)
    return np.concatenate([np.full((count, 1), exponent, np.uint8), weights], 1)


_PACKED: dict[str, Draw] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
