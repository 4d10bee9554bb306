"""Operators over packed weights on the CPU: few bfloat16 rows, rows rounded to int8, and unpacking.

Each weight is unpacked to float32 with the bits of its format and rounded once to bfloat16; or rows
are rounded to int8 (`kernels/int8_rows.py`), then any number of them is taken. A row's bits depend
on the row, the matrix and the variant alone; rounded, on no variant either.

A type is the number by which packed.hpp knows a format: a place in `BLOCK_NAMES`; or `SECTIONS`
and, from the lowest bit on, 2 bits of form (bfloat16, integers of 4 bits, of 8, FP8), 2 of the
scales' type, 1 for zeros, then the logarithm of a group's size.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from lowtide.formats import MatrixFormat, StoredMatrix
from lowtide.formats.arranged import SCALE_DTYPES, SectionedMatrix
from lowtide.formats.fp8 import BLOCK, Fp8Blocks
from lowtide.formats.ggml import GgmlFormat, PackedMatrix
from lowtide.formats.grouped_ints import GroupedInts
from lowtide.formats.quantised import Quantised
from lowtide.formats.quantised_matrix import QuantisedMatrix
from lowtide.kernels.cpu.few_rows import VARIANTS, num_variants
from lowtide.kernels.cpu.library import functions_of
from lowtide.kernels.cpu.weight_calls import CompiledExperts, MatrixCall, WeightCalls

_SMALL = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")
_LARGE = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
_WITH_GRIDS = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
OWN_NAMES = ("q8", "q4")
BLOCK_NAMES = (*_SMALL, *_LARGE, *_WITH_GRIDS, *OWN_NAMES)
"""In the order of `block_type` in packed.hpp; packed.cpp and rounded.cpp count them, too."""

SECTIONS = 1 << 16
PLAIN = SECTIONS
"""The type of what is bfloat16 already."""

_OF_4_BITS, _OF_8_BITS, _FP8 = 1, 2, 3

MAX_FEW_ROWS = 32
"""So many rows of an expert, which a block of diffusion has, are taken in a call over several."""

INT8_VARIANTS = (*VARIANTS[:2], "AVX-VNNI", "AVX-512 with VNNI", "AMX in int8")
"""The same as `VARIANTS` where rows are rounded. All have the same bits."""

_INT, _LONG, _P = ctypes.c_int, ctypes.c_long, ctypes.c_void_p
_FUNCTIONS = {"packed_unpack": (None, _INT, _INT, _P, _LONG, _LONG, _P, _LONG, _LONG, _P)}


class PackedOperators:
    """The compiled operators in one of their variants, over every packed format."""

    def __init__(
        self, library: ctypes.CDLL, variant: int | None = None, rounds_rows: bool = False
    ) -> None:
        """variant: of `VARIANTS`, or where rows are rounded to int8 of `INT8_VARIANTS`; by default
        the best of this processor."""
        self.rounds_rows = rounds_rows
        best = library.lowtide_best_int8() if rounds_rows else num_variants(library) - 1
        self.num_variants = best + 1
        self.variant = best if variant is None else variant
        self.name = (INT8_VARIANTS if rounds_rows else VARIANTS)[self.variant]
        self._most_unpacking = min(num_variants(library) - 1, 2)
        if rounds_rows:
            self.calls = self._own_calls = WeightCalls(
                library, "rounded", self.variant, sys.maxsize
            )
        else:
            best_own: int = library.lowtide_best_own()
            of_own = best_own if variant is None else min(variant, best_own)
            most, most_own = (
                library.lowtide_max_rows(self.variant),
                library.lowtide_max_own_rows(of_own),
            )
            self.calls = WeightCalls(library, "packed", self.variant, most)
            self._own_calls = WeightCalls(library, "packed", of_own, most_own)
        self._unpack = functions_of(library, _FUNCTIONS)["packed_unpack"]

    def has(self, matrix: object) -> bool:
        """Whether `unpack` takes a matrix."""
        return _place_of(matrix) is not None

    def matrix_call(self, matrix: StoredMatrix) -> MatrixCall | None:
        """What multiplies with it; None where nothing compiled does, or only with the whole matrix
        whose rows these are: its sections lie apart."""
        place = _place_of(matrix)
        if place is None or (self.rounds_rows and place.type >= SECTIONS):
            return None
        if isinstance(matrix, SectionedMatrix) and matrix.numbers != range(matrix.whole_shape[0]):
            return None
        calls = self._own_calls if _is_own(place.type) else self.calls
        return MatrixCall(calls, place.type, place.address)

    def experts(self, types: Sequence[int]) -> CompiledExperts | None:
        """The compiled experts of slots whose gate, up and down are of these types; None where
        there are none."""
        if self.rounds_rows and max(types) >= SECTIONS:
            return None
        are_own = {_is_own(each) for each in types}
        if len(are_own) > 1 and self._own_calls.variant != self.calls.variant:
            return None
        calls = self._own_calls if are_own == {True} else self.calls
        return CompiledExperts(calls, types, min(MAX_FEW_ROWS, calls.max_rows))

    def unpack(self, matrix: StoredMatrix, out: Tensor) -> None:
        """See `StoredMatrix.unpack`, for a contiguous bfloat16 out [out, in] and a matrix that it
        `has`. The same bits in every variant."""
        place = _place_of(matrix)
        assert place is not None, f"{type(matrix).__name__} is in no packed format"
        numbers: Tensor | None = None
        first, num_rows = 0, matrix.shape[0]
        if isinstance(matrix, SectionedMatrix):
            if isinstance(matrix.numbers, range):
                first = matrix.numbers.start
            else:
                numbers = matrix.numbers.contiguous()
            num_rows = matrix.whole_shape[0]
        calls = self._own_calls if _is_own(place.type) else self.calls
        self._unpack(
            min(calls.variant, self._most_unpacking) if self.rounds_rows else calls.variant,
            place.type,
            place.address,
            num_rows,
            matrix.shape[1],
            None if numbers is None else numbers.data_ptr(),
            first,
            matrix.shape[0],
            out.data_ptr(),
        )


@functools.cache
def type_number(stored: MatrixFormat) -> int | None:
    """The type of a format; None where no compiled operator knows it."""
    if stored.name == "BF16":
        return PLAIN
    if isinstance(stored, GgmlFormat | Quantised):
        return BLOCK_NAMES.index(stored.name) if stored.name in BLOCK_NAMES else None
    if isinstance(stored, GroupedInts):
        form = _OF_4_BITS if stored.num_bits == 4 else _OF_8_BITS
        group, has_zeros = stored.group, stored.has_zeros
    elif isinstance(stored, Fp8Blocks):
        form, group, has_zeros = _FP8, BLOCK, False
    else:
        return None
    scale = SCALE_DTYPES.index(stored.scale_dtype)
    return SECTIONS | form | scale << 2 | has_zeros << 4 | (group.bit_length() - 1) << 5


class _Place(NamedTuple):
    type: int
    address: int


def _place_of(matrix: object) -> _Place | None:
    """Where a matrix in host memory is, if it is in a packed format."""
    if isinstance(matrix, PackedMatrix):
        number, bytes_of = type_number(matrix.format), matrix.stored
    elif isinstance(matrix, SectionedMatrix):
        number, bytes_of = type_number(matrix.format), matrix.content
    elif isinstance(matrix, QuantisedMatrix):
        number, bytes_of = BLOCK_NAMES.index(f"q{matrix.num_bits}"), matrix.data
    else:
        return None
    return None if number is None else _Place(number, bytes_of.data_ptr())


def _is_own(number: int) -> bool:
    return len(BLOCK_NAMES) - len(OWN_NAMES) <= number < len(BLOCK_NAMES)
