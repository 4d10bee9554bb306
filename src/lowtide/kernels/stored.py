"""Products with matrices that are not in the compute dtype, a tile of rows at a time.

A tile of weights is unpacked into a core's cache and multiplied there, so that the matrix never
exists in the compute dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowtide.formats import StoredMatrix
from lowtide.memory.chunking import MAX_REMAINDER, tiles

if TYPE_CHECKING:
    from lowtide.kernels.reference import Kernels

TILE_WEIGHTS = 1 << 17
"""Approximate weights of a tile: 256 KiB in bfloat16. Fixed, because it decides bits."""

_ROWS_UNIT = 64  # a product's bits are the same however its rows are cut at multiples of it


def tile_rows(num_columns: int) -> int:
    """Return the number of rows of a tile of a matrix [.., num_columns]."""
    return max(_ROWS_UNIT, TILE_WEIGHTS // num_columns // _ROWS_UNIT * _ROWS_UNIT)


def unpacking_bytes(shape: tuple[int, ...]) -> int:
    """Return the most scratch bytes that a thread needs to multiply by a matrix of this shape.

    A tile has its weights in float32, twice, its codes and a copy of these, and its weights in the
    compute dtype.
    """
    num_rows = min(shape[0], tile_rows(shape[1]) + MAX_REMAINDER)
    return num_rows * shape[1] * 16


def multiply(
    kernels: Kernels, x: Tensor, matrix: StoredMatrix, bias: Tensor | None, out: Tensor
) -> None:
    """Compute `out = x @ matrix.t() + bias`; see `Kernels.multiply_by`."""
    num_rows, num_columns = matrix.shape
    length = tile_rows(num_columns)
    shape = (min(num_rows, length + MAX_REMAINDER), num_columns)
    scratch = torch.empty(shape, dtype=x.dtype, device=x.device)
    for features in tiles(num_rows, length):
        weights = scratch[: min(features.stop, num_rows) - features.start]
        kernels.unpack(matrix.rows(features), weights)
        part = None if bias is None else bias[features]
        kernels.multiply(x, weights.t(), part, out[:, features])
