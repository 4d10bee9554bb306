"""Operators over weights of ggml's packed types on the CPU: few bfloat16 rows, and unpacking.

Each weight is unpacked to float32 with the bits of `formats/ggml` and rounded once to bfloat16, and
sums are those of `few_rows.py`: products have the bits of its own with the weights unpacked. A
library of their own, built when a model has such weights; threads are the team of `few_rows.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lowtide.core import IntArray
from lowtide.formats import MatrixFormat
from lowtide.formats.ggml import GgmlFormat, PackedMatrix
from lowtide.kernels.cpu.few_rows import VARIANTS, num_variants
from lowtide.kernels.cpu.library import FEW_ROWS, GGML, load_library
from lowtide.kernels.operands import SlotPlaces

_SMALL = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "IQ4_NL", "MXFP4")
NAMES = (*_SMALL, "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
"""In the order of the types in ggml_unpack.cpp; what is bfloat16 as it lies there comes last."""

PLAIN = len(NAMES)
"""The number of what is bfloat16 already."""

_INT, _LONG, _P = ctypes.c_int, ctypes.c_long, ctypes.c_void_p
_TYPES = {
    "unpack": (_INT, _INT, _P, _LONG, _P),
    "multiply": (_INT, _INT, _INT, _P, _LONG, _P, _P, _P, *4 * (_LONG,)),
    "mlps": (_INT, _INT, _P, _P, _LONG, *3 * (_P,), _LONG, *3 * (_P,), *2 * (_LONG,)),
    "experts": (_INT, _INT, _P, *7 * (_P,), _LONG, *4 * (_P,), *4 * (_LONG,)),
}


class GgmlOperators:
    """The compiled operators in one of their variants, the `VARIANTS` of few_rows.py."""

    def __init__(self, library: ctypes.CDLL, variant: int | None = None) -> None:
        """variant: of `VARIANTS` one that runs here, by default the last of them."""
        self.num_variants = num_variants(library)
        self.variant = self.num_variants - 1 if variant is None else variant
        self.name = VARIANTS[self.variant]
        self.max_rows: int = library.lowtide_max_rows(self.variant)
        # Functions of their own: those of the library's attributes are shared.
        self.call = {name: library[f"lowtide_ggml_{name}"] for name in _TYPES}
        for name, function in self.call.items():
            function.argtypes, function.restype = _TYPES[name], None

    @classmethod
    def load(cls, variant: int | None = None) -> GgmlOperators:
        """Compiled now, or from the cache. Raises UnsupportedError or StorageError."""
        library = load_library(*GGML)
        team = ctypes.cast(load_library(*FEW_ROWS).lowtide_run_together, _P)
        library.lowtide_borrow_team(team)
        return cls(library, variant)

    def takes(self, x: Tensor) -> bool:
        """Whether these rows are few, of the right type and in host memory."""
        return x.shape[0] <= self.max_rows and x.dtype is torch.bfloat16 and x.is_cpu

    def multiply(
        self,
        x: Tensor,
        matrix: PackedMatrix,
        bias: Tensor | None,
        out: Tensor,
        num_threads: int = 1,
    ) -> None:
        """`out = x @ matrix.t() + bias` for few rows x [n, in] and out [n, out], bfloat16, the
        elements of a row adjacent; rounds once, after the bias."""
        num_rows, num_k = x.shape
        self.call["multiply"](
            self.variant,
            num_threads,
            NAMES.index(matrix.format.ggml_name),
            x.data_ptr(),
            x.stride(0),
            matrix.stored.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            num_rows,
            out.shape[1],
            num_k,
        )

    def unpack(self, matrix: PackedMatrix, out: Tensor) -> None:
        """See `StoredMatrix.unpack`, for a contiguous bfloat16 out [out, in]."""
        packed = matrix.format
        self.call["unpack"](
            self.variant,
            NAMES.index(packed.ggml_name),
            matrix.stored.data_ptr(),
            matrix.nbytes // packed.block_bytes[0],
            out.data_ptr(),
        )


class PackedExperts:
    """Several experts of few rows each in one call: a `SeveralExperts` over slots whose gate, up
    and down are each in one of these types, or in bfloat16."""

    def __init__(self, operators: GgmlOperators, types: Sequence[int]) -> None:
        """types: of gate, up and down, `type_number`s."""
        self.max_rows = operators.max_rows
        self._operators = operators
        self._types = np.array(types, np.int32)

    def takes(self, x: Tensor) -> bool:
        """Whether `run_experts` takes these rows."""
        return self._operators.takes(x)

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
            self._types.ctypes.data,
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
            self._types.ctypes.data,
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


def type_number(stored: MatrixFormat) -> int | None:
    """The number by which the compiled operators know a format; None where they do not."""
    if isinstance(stored, GgmlFormat):
        return NAMES.index(stored.ggml_name)
    return PLAIN if stored.name == "BF16" else None
