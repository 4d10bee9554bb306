"""GPTQ in 4 bits, as AutoGPTQ and GPTQModel write it.

A matrix [out, in] has 8 numbers to an int32, the first in its lowest bits: `qweight` [in / 8, out]
along the input, `qzeros` [groups, out / 8] along the output, `scales` [groups, out]; `g_idx` [in]
is each input's group, which has to be its number divided by the group's size, or 0 where each row
has one scale. In the first convention (`gptq`) zeros are stored less one, in the second (`gptq_v2`)
as they are. One is taken off an int32's eight zeros by one subtraction, so that below zero it
borrows from the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowtide.errors import UnsupportedError
from lowtide.formats.arranged import SCALE_DTYPES, Arranged, Shape, StoredTensor, need_multiple
from lowtide.formats.grouped_ints import FORMATS as IN_MEMORY
from lowtide.formats.grouped_ints import GROUPS, described, nibbles_along_rows
from lowtide.formats.matrix import Bytes
from lowtide.formats.plain import ITEM_BYTES

_ONE_OF_EACH = np.uint32(0x11111111)
"""A one for each of the eight numbers in an int32."""


class Gptq(Arranged):
    """A unit is a group of the input, as it is in memory."""

    def __init__(self, version: int, group: int, scale_dtype: str, is_of_rows: bool) -> None:
        """version: of the convention, 1 or 2."""
        self.version, self.group, self.scale_dtype = version, group, scale_dtype
        self.is_of_rows = is_of_rows
        self.name = f"GPTQ v{version} of {described(group, is_of_rows)} to a {scale_dtype} scale"
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
            StoredTensor(".qweight", "I32", (width // 8, out), self.group // 2 * out),
            StoredTensor(".qzeros", "I32", (groups, out // 8), out // 2, is_whole),
            StoredTensor(".scales", self.scale_dtype, (groups, out), out * scale_bytes, is_whole),
            StoredTensor(".g_idx", "I32", (width,), 4 * self.group),
        )

    def arrange_units(
        self, stored: Sequence[Bytes], shape: Shape, units: range, sections: Sequence[Bytes]
    ) -> None:
        weights, zeros, scales, order = stored
        groups, out = slice(units.start, units.stop), shape[0]
        wanted = np.repeat(np.arange(units.start, units.stop, dtype=np.int32), self.group)
        wanted *= not self.is_of_rows
        if not np.array_equal(order.view(np.int32), wanted):
            raise UnsupportedError(
                "its g_idx is not in order: act-order (desc_act), which is not read"
            )
        words = slice(units.start * self.group // 8, units.stop * self.group // 8)
        of_scales = scales.view(f"u{ITEM_BYTES[self.scale_dtype]}").reshape(-1, out)
        sections[0].view(np.uint32)[:, words] = weights.view(np.uint32).reshape(-1, out).T
        sections[1].view(of_scales.dtype)[:, groups] = of_scales.T
        whole = zeros.view(np.uint32) + _ONE_OF_EACH if self.version == 1 else zeros
        sections[2][:, groups] = nibbles_along_rows(
            whole.view(np.uint8).reshape(len(of_scales), -1), out
        ).T


FORMATS = {
    (version, group, dtype, is_of_rows): Gptq(version, group, dtype, is_of_rows)
    for version in (1, 2)
    for group in GROUPS
    for dtype in SCALE_DTYPES
    for is_of_rows in (False, True)
}
