"""The `pack-quantized` format of compressed-tensors: 4 or 8 bits, as llm-compressor writes it.

A matrix [out, in] has 8 or 4 numbers per int32, lowest bits first, each stored with half of its
range added to the signed number: `weight_packed` [out, in * bits / 32] along the input;
  `weight_scale` [out, groups]; if asymmetric, `weight_zero_point` [out * bits / 32, groups] along
  the output. A scale per row means one group.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.formats.arranged import SCALE_DTYPES, Arranged, Shape, StoredTensor, need_multiple
from lowtide.formats.grouped_ints import FORMATS as IN_MEMORY
from lowtide.formats.grouped_ints import GROUPS, described, nibbles_along_rows
from lowtide.formats.matrix import Bytes
from lowtide.formats.plain import ITEM_BYTES

_UNIT_WITH_ZEROS = 8
"""Rows per unit, so that zeros fill whole int32. Without zeros each row is a unit."""


class PackQuantised(Arranged):
    """A unit is a number of rows; codes and scales are laid out as in memory."""

    def __init__(
        self, num_bits: int, group: int, scale_dtype: str, has_zeros: bool, is_of_rows: bool
    ) -> None:
        self.num_bits, self.group = num_bits, group
        self.scale_dtype, self.has_zeros, self.is_of_rows = scale_dtype, has_zeros, is_of_rows
        shared, zeros = described(group, is_of_rows), " and zero" if has_zeros else ""
        self.name = f"pack-quantized int{num_bits} of {shared} to a {scale_dtype} scale{zeros}"
        self.dtypes = (self.name,)
        self._unit = _UNIT_WITH_ZEROS if has_zeros else 1  # rows
        self.in_memory = IN_MEMORY[num_bits, group, scale_dtype, has_zeros]

    def num_units(self, shape: Shape) -> int:
        return shape[0] // self._unit

    def tensors(self, shape: Shape) -> tuple[StoredTensor, ...]:
        out, width = shape
        need_multiple(width, self.group, "its input")
        need_multiple(out, self._unit, "its output")
        words, groups = width * self.num_bits // 32, 1 if self.is_of_rows else width // self.group
        scale_bytes = ITEM_BYTES[self.scale_dtype] * groups
        zeros = (out * self.num_bits // 32, groups)
        found = (
            StoredTensor(".weight_packed", "I32", (out, words), self._unit * words * 4),
            StoredTensor(
                ".weight_scale", self.scale_dtype, (out, groups), self._unit * scale_bytes
            ),
        )
        if not self.has_zeros:
            return found
        unit_bytes = self._unit * groups * self.num_bits // 8
        return *found, StoredTensor(".weight_zero_point", "I32", zeros, unit_bytes)

    def arrange_units(
        self, stored: Sequence[Bytes], shape: Shape, units: range, sections: Sequence[Bytes]
    ) -> None:
        rows = slice(units.start * self._unit, units.stop * self._unit)
        codes, scales = sections[:2]
        codes[rows] = stored[0].reshape(-1, codes.shape[1])
        numbers = scales.view(f"u{ITEM_BYTES[self.scale_dtype]}")
        found = stored[1].view(numbers.dtype)
        numbers[rows] = found.reshape(-1, 1 if self.is_of_rows else numbers.shape[1])
        if self.has_zeros:
            groups = 1 if self.is_of_rows else sections[2].shape[1]
            words = stored[2].reshape(-1, groups, 4).transpose(0, 2, 1).reshape(-1, groups)
            if self.num_bits == 4:  # [bytes of rows, groups], two rows in a byte
                words = nibbles_along_rows(words.T, 2 * len(words)).T
            sections[2][rows] = words


FORMATS = {
    (num_bits, group, dtype, has_zeros, is_of_rows): PackQuantised(
        num_bits, group, dtype, has_zeros, is_of_rows
    )
    for num_bits in (4, 8)
    for group in GROUPS
    for dtype in SCALE_DTYPES
    for has_zeros in (False, True)
    for is_of_rows in (False, True)
}
"""The readable variants. A zero has as many bits as a code, at most 8, and is kept in a byte."""
