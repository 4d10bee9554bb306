"""Matrices stored in several tensors, and the layout they are rearranged into as they are read.

The layout has the same number of bits, with rows that can be unpacked separately. Torch is needed
only for products.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.core import align_up
from lowtide.errors import CheckpointError
from lowtide.formats.matrix import Bytes, MatrixFormat
from lowtide.formats.plain import CHUNK_WEIGHTS, ITEM_BYTES, convert_plain

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Shape = tuple[int, ...]
Floats = NDArray[np.float32]

_ITEM_BYTES = {**ITEM_BYTES, "I32": 4, "F8_E4M3": 1}

SCALE_DTYPES = tuple(ITEM_BYTES)
"""Dtypes of scales in checkpoints."""


class StoredTensor(NamedTuple):
    """One of the tensors that hold a matrix NAME.weight."""

    ending: str  # after NAME
    dtype: str
    shape: Shape
    unit_bytes: int  # per unit; the last one may be shorter
    is_whole: bool = False  # shared by all units, each of which gets the whole tensor

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


class Sectioned(MatrixFormat, ABC):
    """In-memory layout of a rearranged matrix: one byte range, divided into sections.

    A section has an equal number of bytes for each row of the matrix, or for each group of rows.
    """

    unpacked = "F32"
    is_kept = True
    is_of_host = True
    in_safetensors = False
    block_size, block_bytes = 1, (1,)  # sizes are of whole matrices: `matrix_bytes`

    @abstractmethod
    def sections(self, shape: Shape) -> tuple[Shape, ...]:
        """Return (rows, bytes per row) of each section of a matrix [out, in]."""

    @abstractmethod
    def weights(self, sections: Sequence[Bytes], rows: NDArray[np.int64], width: int) -> Floats:
        """Return float32 weights [n, width] of the given rows [n] of the matrix.

        sections: [rows, bytes]; of those with one row per row of the matrix, only the given rows.
        """

    def matrix_bytes(self, shape: Shape) -> int:
        return sum(align_up(rows * row_bytes) for rows, row_bytes in self.sections(shape))

    def views(self, content: Bytes, shape: Shape) -> list[Bytes]:
        """Split a matrix's bytes into sections [rows, bytes per row]."""
        found, start = [], 0
        for rows, row_bytes in self.sections(shape):
            found.append(content[start : start + rows * row_bytes].reshape(rows, row_bytes))
            start += align_up(rows * row_bytes)
        return found

    def unpack_matrix(self, content: Bytes, shape: Shape, target: Bytes, to: MatrixFormat) -> None:
        """Write all weights into 1-D `target`, in the plain format `to`."""
        sections = self.views(content, shape)
        step, row_bytes = max(1, CHUNK_WEIGHTS // shape[1]), to.num_bytes(shape[1])
        for first in range(0, shape[0], step):
            rows = range(first, min(first + step, shape[0]))
            some = _of_rows(sections, rows, shape[0])
            weights = self.weights(some, np.array(rows), shape[1])
            part = target[first * row_bytes : (first + len(rows)) * row_bytes]
            convert_plain(weights.reshape(-1).view(np.uint8), "F32", part, to.name)

    def matrix(self, tensors: Sequence[Tensor], shape: Shape) -> SectionedMatrix:
        return SectionedMatrix(self, tensors[0], shape, range(shape[0]))


class Arranged(MatrixFormat, ABC):
    """Layout of a matrix in a checkpoint: several tensors, each divided into the same units."""

    unpacked = "F32"
    in_safetensors = False
    block_size, block_bytes = 1, (1,)
    in_memory: Sectioned

    @property
    def kept(self) -> Sectioned:
        return self.in_memory

    @abstractmethod
    def tensors(self, shape: Shape) -> tuple[StoredTensor, ...]:
        """Return the tensors of a matrix [out, in].

        Raises CheckpointError, without the matrix's name, for a shape that does not fit.
        """

    @abstractmethod
    def num_units(self, shape: Shape) -> int: ...

    @abstractmethod
    def arrange_units(
        self, stored: Sequence[Bytes], shape: Shape, units: range, sections: Sequence[Bytes]
    ) -> None:
        """Write some units into the sections of the whole matrix.

        stored: the units' bytes in each tensor.

        Raises UnsupportedError, without the matrix's name, for an unsupported variant.
        """

    def ranges(self, shape: Shape, most_bytes: int) -> Iterator[tuple[range, list[slice]]]:
        """Yield consecutive units and their bytes, at most `most_bytes` if possible."""
        tensors, num_units = self.tensors(shape), self.num_units(shape)
        whole_bytes = sum(each.num_bytes for each in tensors if each.is_whole)
        of_unit = sum(each.unit_bytes for each in tensors if not each.is_whole)
        step = max(1, (most_bytes - whole_bytes) // of_unit)
        for first in range(0, num_units, step):
            units = range(first, min(first + step, num_units))
            yield units, [_bytes_of(each, units) for each in tensors]


class SectionedMatrix:
    """A matrix [out, in] in host memory, or some of its rows."""

    __slots__ = ("content", "format", "numbers", "shape", "whole_shape")

    def __init__(
        self, stored: Sectioned, content: Tensor, whole_shape: Shape, numbers: range | Tensor
    ) -> None:
        """content: 1-D uint8, the whole matrix.

        numbers: row numbers in the whole matrix; a range means adjacent rows.
        """
        self.format, self.content, self.whole_shape = stored, content, whole_shape
        self.numbers = numbers
        self.shape = (len(numbers), *whole_shape[1:])

    @property
    def nbytes(self) -> int:
        return sum(
            row_bytes * (self.shape[0] if rows == self.whole_shape[0] else rows)
            for rows, row_bytes in self.format.sections(self.whole_shape)
        )

    @property
    def device(self) -> torch.device:
        return self.content.device

    def rows(self, features: slice | Tensor) -> SectionedMatrix:
        numbers = self.numbers
        if isinstance(features, slice):
            chosen = numbers[features]
        else:
            chosen = features + numbers.start if isinstance(numbers, range) else numbers[features]
        return SectionedMatrix(self.format, self.content, self.whole_shape, chosen)

    def unpack(self, out: Tensor) -> None:
        import torch

        numbers = self.numbers if isinstance(self.numbers, range) else self.numbers.numpy()
        views = self.format.views(self.content.numpy(), self.whole_shape)
        sections = _of_rows(views, numbers, self.whole_shape[0])
        weights = self.format.weights(sections, np.array(numbers), self.shape[1])
        out.copy_(torch.from_numpy(weights))


def need_multiple(length: int, unit: int, what: str) -> None:
    """Raise CheckpointError if a length is not a multiple of `unit`."""
    if length % unit:
        raise CheckpointError(f"{what} {length} does not divide into {unit}")


def to_float32(stored: Bytes, dtype: str) -> Floats:
    """Convert bytes [rows, n * item bytes] to float32 [rows, n]."""
    flat = np.ascontiguousarray(stored).reshape(-1)
    found = np.empty(flat.size // ITEM_BYTES[dtype], np.float32)
    convert_plain(flat, dtype, found.view(np.uint8), "F32")
    return found.reshape(len(stored), -1)


def _of_rows(
    sections: Sequence[Bytes], rows: range | NDArray[np.int64], num_rows: int
) -> list[Bytes]:
    """Select rows in the sections that have one row per row of the matrix."""
    chosen = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
    return [each[chosen] if len(each) == num_rows else each for each in sections]


def _bytes_of(tensor: StoredTensor, units: range) -> slice:
    if tensor.is_whole:
        return slice(0, tensor.num_bytes)
    stop = min(units.stop * tensor.unit_bytes, tensor.num_bytes)
    return slice(units.start * tensor.unit_bytes, stop)
