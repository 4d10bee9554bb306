"""GPTQ in 4 bits, as AutoGPTQ and GPTQModel write it.

A matrix [out, in] has 8 numbers per int32, lowest bits first: `qweight` [in / 8, out] along the
input, `qzeros` [groups, out / 8] along the output, `scales` [groups, out]; `g_idx` [in] is the
group of each input, which must be its index divided by the group size, or 0 with one scale per row.

In the first convention (`gptq`) zeros are stored less one, in the second (`gptq_v2`) unchanged. The
one is subtracted from a whole int32 of eight zeros, so a zero below it borrows from the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowtide.errors import UnsupportedError
from lowtide.formats.arranged import SCALE_DTYPES, Shape, StoredTensor
from lowtide.formats.grouped_ints import GROUPS, InputGroups, nibbles_along_rows
from lowtide.formats.matrix import Bytes

_ONE_OF_EACH = np.uint32(0x11111111)
"""A one in each of the eight numbers of an int32."""


class Gptq(InputGroups):
    def __init__(self, version: int, group: int, scale_dtype: str, is_of_rows: bool) -> None:
        """version: of the convention, 1 or 2."""
        self.version, self.method = version, f"GPTQ v{version}"
        super().__init__(group, scale_dtype, is_of_rows)

    def weight_shape(self, shape: Shape) -> Shape:
        return shape[1] // 8, shape[0]

    def tensors(self, shape: Shape) -> tuple[StoredTensor, ...]:
        order = StoredTensor(".g_idx", "I32", shape[1:], 4 * self.group)
        return *super().tensors(shape), order

    def arrange_units(
        self, stored: Sequence[Bytes], shape: Shape, units: range, sections: Sequence[Bytes]
    ) -> None:
        weights, zeros, scales, order = stored
        out = shape[0]
        wanted = np.repeat(np.arange(units.start, units.stop, dtype=np.int32), self.group)
        wanted *= not self.is_of_rows
        if not np.array_equal(order.view(np.int32), wanted):
            raise UnsupportedError(
                "its g_idx is not in order: act-order (desc_act), which is not read"
            )
        words = slice(units.start * self.group // 8, units.stop * self.group // 8)
        sections[0].view(np.uint32)[:, words] = weights.view(np.uint32).reshape(-1, out).T
        whole = zeros.view(np.uint32) + _ONE_OF_EACH if self.version == 1 else zeros
        numbers = nibbles_along_rows(whole.view(np.uint8).reshape(-1, out // 2), out)
        self.arrange_ends(scales, numbers, units, sections)


FORMATS = {
    (version, group, dtype, is_of_rows): Gptq(version, group, dtype, is_of_rows)
    for version in (1, 2)
    for group in GROUPS
    for dtype in SCALE_DTYPES
    for is_of_rows in (False, True)
}
