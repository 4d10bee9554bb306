"""AWQ in 4 bits: the `gemm` layout, as AutoAWQ writes it.

A matrix [out, in] has 8 numbers to an int32, along the output in all tensors and in an order of
their own: `qweight` [in, out / 8], `qzeros` [groups, out / 8], `scales` [groups, out]. Zeros are
stored unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lowtide.formats.arranged import SCALE_DTYPES, Arranged, Shape, StoredTensor, need_multiple
from lowtide.formats.grouped_ints import FORMATS as IN_MEMORY
from lowtide.formats.grouped_ints import GROUPS, described, nibbles_along_rows
from lowtide.formats.matrix import Bytes
from lowtide.formats.plain import ITEM_BYTES

_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""The column, of eight, that each number of an int32 belongs to, the lowest bits' first."""

_LOW = np.uint32(0x0F0F0F0F)


class Awq(Arranged):
    """A unit is a group of the input, as it is in memory."""

    def __init__(self, group: int, scale_dtype: str, is_of_rows: bool) -> None:
        self.group, self.scale_dtype, self.is_of_rows = group, scale_dtype, is_of_rows
        self.name = f"AWQ of {described(group, is_of_rows)} to a {scale_dtype} scale"
        self.dtypes = (self.name,)
        self.in_memory = IN_MEMORY[4, group, scale_dtype, True]

    def num_units(self, shape: Shape) -> int:
        return shape[1] // self.group

    def tensors(self, shape: Shape) -> tuple[StoredTensor, ...]:
        out, width = shape
        need_multiple(width, self.group, "its input")
        need_multiple(out, 8, "its output")
        is_whole, scale_bytes = self.is_of_rows, ITEM_BYTES[self.scale_dtype]
        groups = 1 if is_whole else width // self.group
        return (
            StoredTensor(".qweight", "I32", (width, out // 8), self.group * out // 2),
            StoredTensor(".qzeros", "I32", (groups, out // 8), out // 2, is_whole),
            StoredTensor(".scales", self.scale_dtype, (groups, out), out * scale_bytes, is_whole),
        )

    def arrange_units(
        self, stored: Sequence[Bytes], shape: Shape, units: range, sections: Sequence[Bytes]
    ) -> None:
        weights, zeros, scales = stored
        groups, out = slice(units.start, units.stop), shape[0]
        words = weights.view(np.uint32).reshape(-1, 2, out // 8)  # pairs of inputs
        columns = slice(units.start * self.group // 2, units.stop * self.group // 2)
        halves = _halves_joined(words[:, 0], words[:, 1])
        target = sections[0].reshape(out // 8, 8, -1)[:, :, columns]
        for place, half in enumerate(halves):
            bytes_of = half.view(np.uint8).reshape(len(half), out // 8, 4)
            for number in range(4):  # of the int32's numbers the 2 * number + place
                target[:, _ORDER[2 * number + place]] = bytes_of[:, :, number].T
        of_scales = scales.view(f"u{ITEM_BYTES[self.scale_dtype]}").reshape(-1, out)
        sections[1].view(of_scales.dtype)[:, groups] = of_scales.T
        numbers = nibbles_along_rows(zeros.reshape(len(of_scales), -1), out)
        numbers = numbers.reshape(len(of_scales), -1, 8)
        ordered = np.empty_like(numbers)
        ordered[:, :, _ORDER] = numbers
        sections[2][:, groups] = ordered.reshape(len(of_scales), out).T


FORMATS = {
    (group, dtype, is_of_rows): Awq(group, dtype, is_of_rows)
    for group in GROUPS
    for dtype in SCALE_DTYPES
    for is_of_rows in (False, True)
}


def _halves_joined(
    first: NDArray[np.uint32], second: NDArray[np.uint32]
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Regroups the words of two inputs, whose bytes hold two numbers of one input, into words whose
    bytes hold the same number of both inputs: those of the low halves, and of the high ones."""
    low = first & _LOW | (second & _LOW) << np.uint32(4)
    return low, first >> np.uint32(4) & _LOW | second & ~_LOW
