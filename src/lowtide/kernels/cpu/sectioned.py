"""Operators over integers in groups and FP8 by blocks, as GPTQ, AWQ, compressed-tensors and FP8
checkpoints are kept: see `packed.py`.

A type is, from its lowest bit on: 2 bits of form (bfloat16, integers of 4 bits, of 8, FP8), 2 of
the scales' type, 1 for zeros, then the logarithm of a group's size.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TypeGuard

from torch import Tensor

from lowtide.formats import MatrixFormat
from lowtide.formats.arranged import SCALE_DTYPES, SectionedMatrix
from lowtide.formats.fp8 import BLOCK, Fp8Blocks
from lowtide.formats.grouped_ints import GroupedInts
from lowtide.kernels.cpu.library import SECTIONED
from lowtide.kernels.cpu.packed import PackedOperators
from lowtide.kernels.cpu.weight_calls import MatrixCall
from lowtide.kernels.operands import Matrix

_OF_4_BITS, _OF_8_BITS, _FP8 = 1, 2, 3

_INT, _LONG, _P = ctypes.c_int, ctypes.c_long, ctypes.c_void_p


class SectionedOperators(PackedOperators[SectionedMatrix]):
    """Multiplies with whole matrices: some rows of one are unpacked, its sections lie apart."""

    kind, sources, plain = "sectioned", SECTIONED, 0

    def __init__(self, library: ctypes.CDLL, variant: int | None = None) -> None:
        super().__init__(library, variant)
        self._unpack = library["lowtide_sectioned_unpack"]  # of its own: an attribute is shared
        self._unpack.argtypes = (_INT, _INT, _P, _LONG, _LONG, _P, _LONG, _LONG, _P)
        self._unpack.restype = None

    def type_number(self, stored: MatrixFormat) -> int | None:
        return type_number(stored)

    def has(self, matrix: Matrix) -> TypeGuard[SectionedMatrix]:
        return isinstance(matrix, SectionedMatrix) and type_number(matrix.format) is not None

    def matrix_call(self, matrix: SectionedMatrix) -> MatrixCall | None:
        number = type_number(matrix.format)
        is_whole = matrix.numbers == range(matrix.whole_shape[0])
        if number is None or not is_whole:
            return None
        return MatrixCall(self.calls, number, matrix.content.data_ptr())

    def unpack(self, matrix: SectionedMatrix, out: Tensor) -> None:
        numbers = matrix.numbers
        chosen = None if isinstance(numbers, range) else numbers.contiguous()
        self._unpack(
            self.variant,
            type_number(matrix.format),
            matrix.content.data_ptr(),
            *matrix.whole_shape,
            None if chosen is None else chosen.data_ptr(),
            numbers.start if isinstance(numbers, range) else 0,
            matrix.shape[0],
            out.data_ptr(),
        )


@functools.cache
def type_number(stored: MatrixFormat) -> int | None:
    """The number by which the compiled operators know a format; None where they do not."""
    if stored.name == "BF16":
        return SectionedOperators.plain
    if isinstance(stored, GroupedInts):
        form = _OF_4_BITS if stored.num_bits == 4 else _OF_8_BITS
        group, has_zeros = stored.group, stored.has_zeros
    elif isinstance(stored, Fp8Blocks):
        form, group, has_zeros = _FP8, BLOCK, False
    else:
        return None
    scale = SCALE_DTYPES.index(stored.scale_dtype)
    return form | scale << 2 | has_zeros << 4 | (group.bit_length() - 1) << 5
