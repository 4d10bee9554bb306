"""Weights of ggml's packed types to bfloat16 on the CPU, with the bits of `formats/ggml`.

A library of its own, built when a model has such weights.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from lowtide.formats.ggml import PackedMatrix
from lowtide.kernels.cpu.library import GGML, load_library

_SMALL = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "IQ4_NL", "MXFP4")
NAMES = (*_SMALL, "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
"""In the order of the functions in ggml.cpp."""

_INT, _LONG, _P = ctypes.c_int, ctypes.c_long, ctypes.c_void_p


class GgmlOperators:
    """The compiled operator in one of its variants. All variants give the same bits."""

    def __init__(self, library: ctypes.CDLL, variant: int | None = None) -> None:
        """variant: from 0, portable, to `num_variants - 1`, the best of this CPU and default."""
        self.num_variants = library.lowtide_best_ggml() + 1
        self._variant = self.num_variants - 1 if variant is None else variant
        self._unpack = library["lowtide_ggml_unpack"]  # a function of its own
        self._unpack.argtypes, self._unpack.restype = (_INT, _INT, _P, _LONG, _P), None

    @classmethod
    def load(cls, variant: int | None = None) -> GgmlOperators:
        """Compiled now, or from the cache. Raises UnsupportedError or StorageError."""
        return cls(load_library(*GGML), variant)

    def unpack(self, matrix: PackedMatrix, out: Tensor) -> None:
        """See `StoredMatrix.unpack`, for a contiguous bfloat16 out [out, in]."""
        packed = matrix.format
        self._unpack(
            self._variant,
            NAMES.index(packed.ggml_name),
            matrix.stored.data_ptr(),
            matrix.nbytes // packed.block_bytes[0],
            out.data_ptr(),
        )
