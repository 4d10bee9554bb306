"""Integers with a scale, and perhaps a zero, per group of adjacent inputs.

  weight = scale * (code - zero)          code: 0 .. 2^bits - 1, exact in float32

Without zeros, every zero is half of the codes' range. In memory a matrix is its codes, row by row
(two of 4 bits per byte, the even one low), then all scales as stored, then zeros, a byte each.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lowtide.formats.arranged import (
    SCALE_DTYPES,
    Arranged,
    Floats,
    Sectioned,
    Shape,
    StoredTensor,
    need_multiple,
    to_float32,
)
from lowtide.formats.matrix import Bytes
from lowtide.formats.plain import ITEM_BYTES

GROUPS = (32, 64, 128)
"""Supported group sizes."""


def group_in_memory(width: int) -> int:
    """Return the group size in memory for rows with a single scale, which every group repeats.

    It is the largest size that divides a row, or else the smallest.
    """
    return next((group for group in reversed(GROUPS) if width % group == 0), GROUPS[0])


def described(group: int, is_of_rows: bool) -> str:
    """Describe, for a format's name, which weights share a scale."""
    return f"rows (groups of {group} in memory)" if is_of_rows else str(group)


class GroupedInts(Sectioned):
    """Grouped integers in memory."""

    def __init__(self, num_bits: int, group: int, scale_dtype: str, has_zeros: bool) -> None:
        self.num_bits, self.group = num_bits, group
        self.scale_dtype, self.has_zeros = scale_dtype, has_zeros
        zeros = " and zero" if has_zeros else ""
        self.name = f"int{num_bits} of {group} to a {scale_dtype} scale{zeros}"
        self.dtypes = (self.name,)

    def sections(self, shape: Shape) -> tuple[Shape, ...]:
        out, width = shape
        num_groups = width // self.group
        zeros = ((out, num_groups),) if self.has_zeros else ()
        scale_bytes = ITEM_BYTES[self.scale_dtype]
        return (out, width * self.num_bits // 8), (out, num_groups * scale_bytes), *zeros

    def weights(self, sections: Sequence[Bytes], rows: NDArray[np.int64], width: int) -> Floats:
        codes = sections[0]
        if self.num_bits == 4:
            numbers = _nibbles().take(codes).view(np.float32)
        else:
            numbers = codes.astype(np.float32)
        groups: Floats = numbers.reshape(len(rows), -1, self.group)
        if self.has_zeros:
            groups -= sections[2].astype(np.float32)[:, :, None]
        else:
            groups -= np.float32(2 ** (self.num_bits - 1))
        with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaN are kept
            groups *= to_float32(sections[1], self.scale_dtype)[:, :, None]
        return groups.reshape(len(rows), width)


FORMATS = {
    (num_bits, group, dtype, has_zeros): GroupedInts(num_bits, group, dtype, has_zeros)
    for num_bits in (4, 8)
    for group in GROUPS
    for dtype in SCALE_DTYPES
    for has_zeros in (False, True)
}


class InputGroups(Arranged):
    """Four-bit grouped integers with zeros in a checkpoint. A unit is a group of inputs."""

    method: str

    def __init__(self, group: int, scale_dtype: str, is_of_rows: bool) -> None:
        self.group, self.scale_dtype, self.is_of_rows = group, scale_dtype, is_of_rows
        self.name = f"{self.method} of {described(group, is_of_rows)} to a {scale_dtype} scale"
        self.dtypes = (self.name,)
        self.in_memory = FORMATS[4, group, scale_dtype, True]

    @abstractmethod
    def weight_shape(self, shape: Shape) -> Shape:
        """Return the shape of the int32 tensor with the weights of a matrix [out, in]."""

    def num_units(self, shape: Shape) -> int:
        return shape[1] // self.group

    def tensors(self, shape: Shape) -> tuple[StoredTensor, ...]:
        out, width = shape
        need_multiple(width, self.group, "its input")
        need_multiple(out, 8, "its output")
        is_whole, scale_bytes = self.is_of_rows, ITEM_BYTES[self.scale_dtype]
        groups = 1 if is_whole else width // self.group
        return (
            StoredTensor(".qweight", "I32", self.weight_shape(shape), self.group * out // 2),
            StoredTensor(".qzeros", "I32", (groups, out // 8), out // 2, is_whole),
            StoredTensor(".scales", self.scale_dtype, (groups, out), out * scale_bytes, is_whole),
        )

    def arrange_ends(
        self, scales: Bytes, zeros: Bytes, units: range, sections: Sequence[Bytes]
    ) -> None:
        """Write some units' scales, as stored, and zeros [groups, out]."""
        groups = slice(units.start, units.stop)
        numbers = scales.view(f"u{ITEM_BYTES[self.scale_dtype]}").reshape(len(zeros), -1)
        sections[1].view(numbers.dtype)[:, groups] = numbers.T
        sections[2][:, groups] = zeros.T


def nibbles_along_rows(packed: Bytes, num_columns: int) -> Bytes:
    """Unpack [rows, bytes] to numbers [rows, columns], the low nibble first."""
    both = np.stack((packed & np.uint8(15), packed >> np.uint8(4)), axis=-1)
    return both.reshape(len(packed), -1)[:, :num_columns]


@functools.cache
def _nibbles() -> NDArray[np.uint64]:
    """Return both numbers of every byte as float32, the low nibble first."""
    numbers = np.arange(256)
    pairs = np.stack((numbers & 15, numbers >> 4), axis=1).astype(np.float32)
    return pairs.view(np.uint64).reshape(-1)
