"""ggml types of two or three bits: magnitudes from a grid of points, and sign bits.

Layouts and formulas: ggml's `ggml-common.h` and `dequantize_row_*`. A point is the magnitudes of
eight adjacent weights, in IQ3 of four. The signs of eight weights are a byte, or seven bits if the
eighth makes the number of negative ones even.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.formats.ggml.small_types import BlockGroups, Numbers, Weights, float32, nibble_pairs
from lowtide.formats.matrix import Bytes

_POINTS = Path(__file__).parents[2] / "kernels" / "cpu" / "packed" / "ggml_grids.hpp"
"""The file of all points, shared with the compiled kernels."""

_SIZES = {
    "IQ2_XXS": (8, 25, 43),
    "IQ2_XS": (8, 25, 43),
    "IQ2_S": (8, 25, 43),
    "IQ3_XXS": (4, 12, 20, 28, 36, 44, 52, 62),
    "IQ3_S": (1, 3, 5, 7, 9, 11, 13, 15),
}

_D = ("d", "<f2")
_IQ2_XXS = np.dtype([_D, ("q", [("i", "u1", 4), ("s", "<u4")], 8)])
_IQ2_XS = np.dtype([_D, ("q", "<u2", 32), ("s", "u1", 8)])
_IQ2_S = np.dtype([_D, ("q", "u1", 32), ("n", "u1", 32), ("h", "u1", 8), ("s", "u1", 8)])
_IQ3_XXS = np.dtype([_D, ("q", "u1", 64), ("s", "<u4", 8)])
_IQ3_S = np.dtype([_D, ("q", "u1", 64), ("h", "u1", 8), ("n", "u1", 32), ("s", "u1", 4)])

_EVEN_SIGNS = np.array([n | n.bit_count() % 2 << 7 for n in range(128)], np.uint8)

Integers = NDArray[np.integer[Any]]


def _iq2_xxs(stored: Bytes) -> BlockGroups:
    block = stored.view(_IQ2_XXS)
    words = block["q"]["s"]
    scales = _scales(block, words >> 28, 0.25)
    return _groups("IQ2_XXS", block["q"]["i"], _signs_of_words(words), scales)


def _iq2_xs(stored: Bytes) -> BlockGroups:
    block = stored.view(_IQ2_XS)
    signs = _EVEN_SIGNS.take(block["q"] >> 9)
    return _groups(
        "IQ2_XS", block["q"] & 511, signs, _scales(block, nibble_pairs(block["s"]), 0.25)
    )


def _iq2_s(stored: Bytes) -> BlockGroups:
    block = stored.view(_IQ2_S)
    high = block["h"][:, :, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    points = block["q"] | high.reshape(-1, 32).astype(np.uint16) << 8
    scales = _scales(block, nibble_pairs(block["s"]), 0.25)
    return _groups("IQ2_S", points, block["n"], scales)


def _iq3_xxs(stored: Bytes) -> BlockGroups:
    block = stored.view(_IQ3_XXS)
    scales = _scales(block, block["s"] >> 28, 0.5)
    return _groups("IQ3_XXS", block["q"], _signs_of_words(block["s"]), scales)


def _iq3_s(stored: Bytes) -> BlockGroups:
    block = stored.view(_IQ3_S)
    high = np.unpackbits(block["h"], axis=-1, bitorder="little")
    points = block["q"] | high.astype(np.uint16) << 8
    scales = _scales(block, nibble_pairs(block["s"]), 2.0)
    return _groups("IQ3_S", points, block["n"], scales)


def _scales(block: NDArray[np.void], numbers: Integers, factor: float) -> Weights:
    """Compute the scales; numbers: [blocks, groups], of four bits."""
    halves = numbers.astype(np.float32) + np.float32(0.5)
    return float32(block["d"]) * halves * np.float32(factor)


def _signs_of_words(words: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Unpack seven bits per eight weights: [blocks, 8] to sign bytes [blocks, 8, 4]."""
    return _EVEN_SIGNS.take(words[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127)


def _groups(name: str, points: Integers, signs: NDArray[np.uint8], scales: Weights) -> BlockGroups:
    """Combine grid points and signs; points: numbers in order; signs: a bit per weight."""
    sizes = _grid(name)[points].reshape(-1, 256)
    is_minus = np.unpackbits(signs.reshape(-1, 32), axis=-1, bitorder="little").view(np.bool_)
    numbers, num_groups = np.where(is_minus, -sizes, sizes), scales.shape[1]
    return BlockGroups(numbers.reshape(-1, num_groups, 256 // num_groups), scales)


@functools.cache
def _grid(name: str) -> Numbers:
    """Return a type's points in order, [points, weights of a point]."""
    found = re.search(rf"{name}_POINTS\[\] =([^;]+);", _POINTS.read_text())
    assert found is not None, f"{_POINTS} has no points of {name}"
    digits = re.sub(r'[\s"]', "", found[1])
    points = np.frombuffer(bytes.fromhex(digits), ">u2")[:, None]
    num_bits = 4 if name.startswith("IQ3") else 2
    numbers = points >> np.arange(0, 16, num_bits, dtype=np.uint16) & (1 << num_bits) - 1
    return np.array(_SIZES[name], np.int8).take(numbers)


TYPES = {
    "IQ2_XXS": (_IQ2_XXS, _iq2_xxs),
    "IQ2_XS": (_IQ2_XS, _iq2_xs),
    "IQ2_S": (_IQ2_S, _iq2_s),
    "IQ3_XXS": (_IQ3_XXS, _iq3_xxs),
    "IQ3_S": (_IQ3_S, _iq3_s),
}
"""By type name: the fields of a block, and the function from 1-D bytes to groups."""
