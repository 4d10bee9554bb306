"""Operators over weights in 8 or 4 bits on the CPU: products of bfloat16 rows, and rounding.

Each weight is rounded once to bfloat16, so these are the weights that more rows are multiplied
with, too; or the rows are rounded to int8 (`kernels/int8_rows.py`), however many they are. A
library of their own, built when a format is first used; threads are the team of `few_rows.py`. A
row's bits depend on the row and the matrix alone, and on the kind of instructions.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np
from torch import Tensor

from lowtide.formats import MatrixFormat
from lowtide.formats.convert import pack
from lowtide.formats.matrix import Bytes
from lowtide.formats.plain import ITEM_BYTES, convert_plain
from lowtide.formats.quantised import Floats, QuantisedRows
from lowtide.formats.quantised_matrix import QuantisedMatrix
from lowtide.kernels.cpu.library import QUANTISED, load_borrowing
from lowtide.kernels.cpu.weight_calls import CompiledExperts, MatrixCall, WeightCalls

MAX_FEW_ROWS = 32
"""`MOST_QUANTISED_ROWS` of quantised_products.hpp, which a block of diffusion has: so many rounded
rows of an expert are taken in a call over several. As they are, some variants take fewer; with more
rows a tile of weights is unpacked and multiplied with by torch's product."""

VARIANTS = ("plain", "plain, AVX2", "plain, AVX-512", "AVX-512 with bfloat16", "AMX")
"""From the slowest; a processor has all up to its best."""

INT8_VARIANTS = (*VARIANTS[:3], "AVX-512 with VNNI", "AMX in int8")
"""The same where rows are rounded. All have the same bits."""

_INT, _LONG, _P = ctypes.c_int, ctypes.c_long, ctypes.c_void_p
_TYPES = {
    "unpack": (_INT, _INT, _P, _P, *2 * (_LONG,)),
    "pack": (_INT, _INT, _INT, _P, _P, _P, *2 * (_LONG,)),
}


class QuantisedOperators:
    """The compiled operators in one of their variants."""

    def __init__(
        self, library: ctypes.CDLL, variant: int | None = None, rounds_rows: bool = False
    ) -> None:
        """variant: an index of `VARIANTS`, or where rows are rounded to int8 of `INT8_VARIANTS`; by
        default the best of this CPU."""
        best = (
            library.lowtide_best_quantised_int8 if rounds_rows else library.lowtide_best_quantised
        )
        self.num_variants = best() + 1
        self.variant = self.num_variants - 1 if variant is None else variant
        self.rounds_rows = rounds_rows
        max_rows = sys.maxsize  # rounded, they have the same bits in every product
        if not rounds_rows:
            max_rows = library.lowtide_max_quantised_rows(self.variant)
        kind = "int8" if rounds_rows else "quantised"
        self.calls = WeightCalls(library, kind, self.variant, max_rows)
        # Functions of their own: those of the library's attributes are shared.
        functions = {name: library[f"lowtide_quantised_{name}"] for name in _TYPES}
        for name, function in functions.items():
            function.argtypes, function.restype = _TYPES[name], None
        self._unpack, self._pack = functions["unpack"], functions["pack"]
        self.name = (INT8_VARIANTS if rounds_rows else VARIANTS)[self.variant]

    @classmethod
    def load(cls, variant: int | None = None, rounds_rows: bool = False) -> QuantisedOperators:
        """Compiled now, or from the cache. Raises UnsupportedError or StorageError."""
        return cls(load_borrowing(*QUANTISED), variant, rounds_rows)

    def matrix_call(self, matrix: QuantisedMatrix) -> MatrixCall:
        """What multiplies with it."""
        return MatrixCall(self.calls, matrix.num_bits, matrix.data.data_ptr())

    def experts(self, num_bits: int) -> CompiledExperts:
        """The compiled experts of slots whose matrices all have so many bits."""
        max_rows = min(MAX_FEW_ROWS, self.calls.max_rows)
        return CompiledExperts(self.calls, 3 * (num_bits,), max_rows)

    def unpack(self, matrix: QuantisedMatrix, out: Tensor) -> None:
        """`QuantisedMatrix.unpack` into a contiguous bfloat16 `out`, the same bits."""
        variant = min(self.variant, 2) if self.rounds_rows else self.variant
        self._unpack(
            variant, matrix.num_bits, matrix.data.data_ptr(), out.data_ptr(), *matrix.shape
        )

    def pack(
        self,
        to: MatrixFormat,
        source: Bytes,
        name: str,
        target: Bytes,
        importance: Floats | None = None,
    ) -> None:
        """`formats.convert.pack`, the same bytes."""
        if not isinstance(to, QuantisedRows):
            pack(to, source, name, target, importance)
            return
        if name not in ("BF16", "F32"):
            wide = np.empty(4 * (len(source) // ITEM_BYTES[name]), np.uint8)
            convert_plain(source, name, wide, "F32")
            source, name = wide, "F32"
        # Bytes of a file may lie at any address: numpy copies where it has to.
        weights = np.require(
            source.view(np.uint16 if name == "BF16" else np.float32), None, ("C", "A")
        )
        worth = None if importance is None else np.ascontiguousarray(importance, np.float32)
        out = np.ascontiguousarray(target)
        self._pack(
            min(self.variant, 2),  # no variant of its own for pairs: it is arithmetic of float32
            to.num_bits,
            name == "BF16",
            weights.ctypes.data,
            None if worth is None else worth.ctypes.data,
            out.ctypes.data,
            len(weights) // to.num_columns,
            to.num_columns,
        )
        if out is not target:
            target[:] = out
