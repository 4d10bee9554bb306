"""Operators over weights in 8 or 4 bits on the CPU: products of bfloat16 rows, and rounding.

Each weight is rounded once to bfloat16, so these are the weights that more rows are multiplied
with, too; or the rows are rounded to int8 (`kernels/int8_rows.py`), however many they are. A
library of their own, built when a format is first used; threads are the team of `few_rows.py`. A
row's bits depend on the row and the matrix alone, and on the kind of instructions.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from lowtide.core import IntArray
from lowtide.formats import MatrixFormat
from lowtide.formats.convert import pack
from lowtide.formats.matrix import Bytes
from lowtide.formats.plain import ITEM_BYTES, convert_plain
from lowtide.formats.quantised import Floats, QuantisedRows
from lowtide.formats.quantised_matrix import QuantisedMatrix
from lowtide.kernels.cpu.library import FEW_ROWS, QUANTISED, load_library
from lowtide.kernels.operands import SlotPlaces

MAX_FEW_ROWS = 16
"""With more rows, unless they are rounded, a tile of weights is unpacked and multiplied with by
torch's product. So many of an expert are taken in a call over several."""

VARIANTS = ("plain", "plain, AVX2", "plain, AVX-512", "AVX-512 with bfloat16", "AMX")
"""From the slowest; a processor has all up to its best."""

INT8_VARIANTS = (*VARIANTS[:3], "AVX-512 with VNNI")
"""The same where rows are rounded. All have the same bits."""

_INT, _LONG, _P = ctypes.c_int, ctypes.c_long, ctypes.c_void_p
_PRODUCTS = {
    "multiply": (_INT, _INT, _INT, _P, _LONG, _P, _P, _P, *4 * (_LONG,)),
    "mlps": (_INT, _INT, _INT, _P, _LONG, *3 * (_P,), _LONG, *3 * (_P,), *2 * (_LONG,)),
    "experts": (_INT, _INT, _INT, *7 * (_P,), _LONG, *4 * (_P,), *4 * (_LONG,)),
}
_CONVERSIONS = {
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
        best = library.lowtide_best_int8 if rounds_rows else library.lowtide_best_quantised
        self.num_variants = best() + 1
        self.variant = self.num_variants - 1 if variant is None else variant
        self.rounds_rows = rounds_rows
        # Functions of their own: those of the library's attributes are shared.
        kind = "int8" if rounds_rows else "quantised"
        self.call = {name: library[f"lowtide_{kind}_{name}"] for name in _PRODUCTS}
        self.call |= {name: library[f"lowtide_quantised_{name}"] for name in _CONVERSIONS}
        for name, types in (_PRODUCTS | _CONVERSIONS).items():
            self.call[name].argtypes, self.call[name].restype = types, None
        self.name = (INT8_VARIANTS if rounds_rows else VARIANTS)[self.variant]

    @classmethod
    def load(cls, variant: int | None = None, rounds_rows: bool = False) -> QuantisedOperators:
        """Compiled now, or from the cache. Raises UnsupportedError or StorageError."""
        library = load_library(*QUANTISED)
        team = ctypes.cast(load_library(*FEW_ROWS).lowtide_run_together, _P)
        library.lowtide_quantised_team(team)
        return cls(library, variant, rounds_rows)

    def takes(self, x: Tensor) -> bool:
        """Whether `multiply` takes these rows."""
        is_right = x.dtype is torch.bfloat16 and x.is_cpu
        return is_right and (self.rounds_rows or x.shape[0] <= MAX_FEW_ROWS)

    def multiply(
        self,
        x: Tensor,
        matrix: QuantisedMatrix,
        bias: Tensor | None,
        out: Tensor,
        num_threads: int = 1,
    ) -> None:
        """`out = x @ matrix.t() + bias` for rows x [n, in] that it takes and out [n, out],
        bfloat16, the elements of a row adjacent; rounds once, after the bias."""
        num_rows, num_k = x.shape
        self.call["multiply"](
            self.variant,
            num_threads,
            matrix.num_bits,
            x.data_ptr(),
            x.stride(0),
            matrix.data.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            num_rows,
            out.shape[1],
            num_k,
        )

    def unpack(self, matrix: QuantisedMatrix, out: Tensor) -> None:
        """`QuantisedMatrix.unpack` into a contiguous bfloat16 `out`, the same bits."""
        variant = min(self.variant, 2) if self.rounds_rows else self.variant
        self.call["unpack"](
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
        # Of files, so at any address: numpy copies where it has to.
        weights = np.require(
            source.view(np.uint16 if name == "BF16" else np.float32), None, ("C", "A")
        )
        worth = None if importance is None else np.ascontiguousarray(importance, np.float32)
        out = np.ascontiguousarray(target)
        self.call["pack"](
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


class QuantisedExperts:
    """Several experts of few rows each in one call: a `SeveralExperts` over slots whose matrices
    are all of so many bits."""

    max_rows = MAX_FEW_ROWS

    def __init__(self, operators: QuantisedOperators, num_bits: int) -> None:
        self._operators = operators
        self._num_bits = num_bits

    def takes(self, x: Tensor) -> bool:
        """Whether `run_experts` takes these rows."""
        return self._operators.takes(x) and x.shape[0] <= self.max_rows

    def gated_mlps(
        self,
        groups: IntArray,
        places: SlotPlaces,
        parts: Tensor,
        gate: Tensor,
        up: Tensor,
        num_threads: int,
    ) -> None:
        """See `FewRows.gated_mlps`."""
        self._operators.call["mlps"](
            self._operators.variant,
            num_threads,
            self._num_bits,
            groups.ctypes.data,
            len(groups),
            *places,
            parts.data_ptr(),
            gate.data_ptr(),
            up.data_ptr(),
            parts.shape[1],
            gate.shape[1],
        )

    def run_experts(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        slots: IntArray,
        places: SlotPlaces,
        parts: Tensor,
        gate: Tensor,
        up: Tensor,
        out: Tensor,
        num_threads: int,
    ) -> None:
        """See `FewRows.run_experts`."""
        num_tokens, k = experts.shape
        self._operators.call["experts"](
            self._operators.variant,
            num_threads,
            self._num_bits,
            x.data_ptr(),
            experts.data_ptr(),
            weights.data_ptr(),
            slots.ctypes.data,
            *places,
            parts.data_ptr(),
            gate.data_ptr(),
            up.data_ptr(),
            out.data_ptr(),
            num_tokens,
            k,
            x.shape[1],
            gate.shape[1],
        )
