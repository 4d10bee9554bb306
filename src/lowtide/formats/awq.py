"""AWQ in 4 bits: the `gemm` layout, as AutoAWQ writes it.

A matrix [out, in] has 8 numbers per int32, along the output in all tensors and in a special
order: `qweight` [in, out / 8], `qzeros` [groups, out / 8], `scales` [groups, out]. Zeros are stored
  unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lowtide.formats.arranged import SCALE_DTYPES, Shape
from lowtide.formats.grouped_ints import GROUPS, InputGroups, nibbles_along_rows
from lowtide.formats.matrix import Bytes

_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Column (of eight) of each number in an int32, lowest bits first."""

_LOW = np.uint32(0x0F0F0F0F)


class Awq(InputGroups):
    method = "AWQ"

    def weight_shape(self, shape: Shape) -> Shape:
        return shape[1], shape[0] // 8

    def arrange_units(
        self, stored: Sequence[Bytes], shape: Shape, units: range, sections: Sequence[Bytes]
    ) -> None:
        weights, zeros, scales = stored
        out = shape[0]
        words = weights.view(np.uint32).reshape(-1, 2, out // 8)  # pairs of inputs
        columns = slice(units.start * self.group // 2, units.stop * self.group // 2)
        halves = _halves_joined(words[:, 0], words[:, 1])
        target = sections[0].reshape(out // 8, 8, -1)[:, :, columns]
        for place, half in enumerate(halves):
            bytes_of = half.view(np.uint8).reshape(len(half), out // 8, 4)
            for number in range(4):  # of the int32's numbers the 2 * number + place
                target[:, _ORDER[2 * number + place]] = bytes_of[:, :, number].T
        numbers = nibbles_along_rows(zeros.reshape(-1, out // 2), out).reshape(-1, out // 8, 8)
        ordered = np.empty_like(numbers)
        ordered[:, :, _ORDER] = numbers
        self.arrange_ends(scales, ordered.reshape(-1, out), units, sections)


FORMATS = {
    (group, dtype, is_of_rows): Awq(group, dtype, is_of_rows)
    for group in GROUPS
    for dtype in SCALE_DTYPES
    for is_of_rows in (False, True)
}


def _halves_joined(
    first: NDArray[np.uint32], second: NDArray[np.uint32]
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Regroup the nibbles of two inputs into words with one byte per column.

    A byte of the source holds two columns of one input; a byte of the result holds one column of
    both inputs. Returns the words of the low nibbles, and of the high ones.
    """
    low = first & _LOW | (second & _LOW) << np.uint32(4)
    return low, first >> np.uint32(4) & _LOW | second & ~_LOW
