"""Operators over weights of ggml's packed types on the CPU: few bfloat16 rows, and unpacking.

Each weight is unpacked to float32 with the bits of `formats/ggml` and rounded once to bfloat16, and
sums are those of `few_rows.py`: products have the bits of its own with the weights unpacked. Or the
rows are rounded to int8 (`kernels/int8_rows.py`), however many they are. Libraries of their own,
built when a model has such weights; threads are the team of `few_rows.py`.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

from torch import Tensor

from lowtide.formats import MatrixFormat
from lowtide.formats.ggml import GgmlFormat, PackedMatrix
from lowtide.kernels.cpu.few_rows import VARIANTS, num_variants
from lowtide.kernels.cpu.library import GGML, GGML_INT8, load_borrowing
from lowtide.kernels.cpu.quantised import INT8_VARIANTS, MAX_FEW_ROWS
from lowtide.kernels.cpu.weight_calls import CompiledExperts, MatrixCall, WeightCalls

_SMALL = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "IQ4_NL", "MXFP4")
NAMES = (*_SMALL, "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
"""In the order of the types in ggml_unpack.cpp and ggml_int8.cpp; what is bfloat16 as it lies there
comes last, which rows are never rounded for."""

PLAIN = len(NAMES)
"""The number of what is bfloat16 already."""

_INT, _LONG, _P = ctypes.c_int, ctypes.c_long, ctypes.c_void_p


class GgmlOperators:
    """The compiled operators in one of their variants."""

    def __init__(
        self,
        library: ctypes.CDLL,
        variant: int | None = None,
        rounding: ctypes.CDLL | None = None,
    ) -> None:
        """rounding: the library of products whose rows are rounded to int8, or none of them are.
        variant: an index of `VARIANTS` of few_rows.py, or of `INT8_VARIANTS` where they are; by
        default the best of this CPU."""
        self.rounds_rows = rounding is not None
        best = num_variants(library) - 1 if rounding is None else rounding.lowtide_best_int8()
        self.num_variants: int = best + 1
        self.variant: int = best if variant is None else variant
        self.name = (VARIANTS if rounding is None else INT8_VARIANTS)[self.variant]
        if rounding is None:
            self.max_rows: int = library.lowtide_max_rows(self.variant)
            self.calls = WeightCalls(library, "ggml", self.variant, self.max_rows)
        else:
            self.max_rows = sys.maxsize
            self.calls = WeightCalls(rounding, "ggml_int8", self.variant, self.max_rows)
        self._unpack = library["lowtide_ggml_unpack"]  # of its own: an attribute is shared
        self._unpack.argtypes, self._unpack.restype = (_INT, _INT, _P, _LONG, _P), None

    @classmethod
    def load(cls, variant: int | None = None, rounds_rows: bool = False) -> GgmlOperators:
        """Compiled now, or from the cache. Raises UnsupportedError or StorageError."""
        rounding = load_borrowing(*GGML_INT8) if rounds_rows else None
        return cls(load_borrowing(*GGML), variant, rounding)

    def matrix_call(self, matrix: PackedMatrix) -> MatrixCall:
        """What multiplies with it."""
        number = NAMES.index(matrix.format.ggml_name)
        return MatrixCall(self.calls, number, matrix.stored.data_ptr())

    def experts(self, types: Sequence[int]) -> CompiledExperts | None:
        """Of slots whose gate, up and down are of these types; None where rows are rounded and one
        is bfloat16."""
        if not self.rounds_rows:
            return CompiledExperts(self.calls, types)
        return None if PLAIN in types else CompiledExperts(self.calls, types, MAX_FEW_ROWS)

    def unpack(self, matrix: PackedMatrix, out: Tensor) -> None:
        """See `StoredMatrix.unpack`, for a contiguous bfloat16 out [out, in]."""
        packed = matrix.format
        self._unpack(
            min(self.variant, 2) if self.rounds_rows else self.variant,
            NAMES.index(packed.ggml_name),
            matrix.stored.data_ptr(),
            matrix.nbytes // packed.block_bytes[0],
            out.data_ptr(),
        )


def type_number(stored: MatrixFormat) -> int | None:
    """The number by which the compiled operators know a format; None where they do not."""
    if isinstance(stored, GgmlFormat):
        return NAMES.index(stored.ggml_name)
    return PLAIN if stored.name == "BF16" else None
