"""Operators over weights of ggml's packed types: see `packed.py`."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Self, TypeGuard

from torch import Tensor

from lowtide.formats import MatrixFormat
from lowtide.formats.ggml import GgmlFormat, PackedMatrix
from lowtide.kernels.cpu.library import GGML, GGML_INT8, load_borrowing
from lowtide.kernels.cpu.packed import PackedOperators
from lowtide.kernels.cpu.quantised import INT8_VARIANTS, MAX_FEW_ROWS
from lowtide.kernels.cpu.weight_calls import CompiledExperts, MatrixCall, WeightCalls
from lowtide.kernels.operands import Matrix

_SMALL = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")
NAMES = (*_SMALL, "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
"""In the order of the types in ggml_unpack.cpp and ggml_int8.cpp; what is bfloat16 as it lies there
comes last, which rows are never rounded for."""

_INT, _LONG, _P = ctypes.c_int, ctypes.c_long, ctypes.c_void_p


class GgmlOperators(PackedOperators[PackedMatrix]):
    """Whose types are places in `NAMES`. Rows may be rounded to int8 (`kernels/int8_rows.py`), then
    any number of them is taken, by products in another library."""

    kind, sources, plain = "ggml", GGML, len(NAMES)

    def __init__(
        self,
        library: ctypes.CDLL,
        variant: int | None = None,
        rounding: ctypes.CDLL | None = None,
    ) -> None:
        """rounding: the library of products whose rows are rounded to int8, or none of them are.
        variant: an index of `VARIANTS` of few_rows.py, or of `INT8_VARIANTS` where they are; by
        default the best of this CPU."""
        super().__init__(library, None if rounding is not None else variant)
        if rounding is not None:
            best: int = rounding.lowtide_best_int8()
            self.rounds_rows, self.num_variants = True, best + 1
            self.variant = best if variant is None else variant
            self.name, self.max_rows = INT8_VARIANTS[self.variant], sys.maxsize
            self.calls = WeightCalls(rounding, "ggml_int8", self.variant, self.max_rows)
        self._unpack = library["lowtide_ggml_unpack"]  # of its own: an attribute is shared
        self._unpack.argtypes, self._unpack.restype = (_INT, _INT, _P, _LONG, _P), None

    @classmethod
    def load(cls, variant: int | None = None, rounds_rows: bool = False) -> Self:
        rounding = load_borrowing(*GGML_INT8) if rounds_rows else None
        return cls(load_borrowing(*GGML), variant, rounding)

    def type_number(self, stored: MatrixFormat) -> int | None:
        if isinstance(stored, GgmlFormat):
            return NAMES.index(stored.ggml_name)
        return self.plain if stored.name == "BF16" else None

    def has(self, matrix: Matrix) -> TypeGuard[PackedMatrix]:
        return isinstance(matrix, PackedMatrix)

    def matrix_call(self, matrix: PackedMatrix) -> MatrixCall:
        number = NAMES.index(matrix.format.ggml_name)
        return MatrixCall(self.calls, number, matrix.stored.data_ptr())

    def experts(self, types: Sequence[int]) -> CompiledExperts | None:
        """None where rows are rounded and a part is bfloat16."""
        if not self.rounds_rows:
            return super().experts(types)
        return None if self.plain in types else CompiledExperts(self.calls, types, MAX_FEW_ROWS)

    def unpack(self, matrix: PackedMatrix, out: Tensor) -> None:
        packed = matrix.format
        self._unpack(
            min(self.variant, 2) if self.rounds_rows else self.variant,
            NAMES.index(packed.ggml_name),
            matrix.stored.data_ptr(),
            matrix.nbytes // packed.block_bytes[0],
            out.data_ptr(),
        )
