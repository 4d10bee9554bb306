"""Names of the compiled kernels' variants, by their numbers."""

from __future__ import annotations

import ctypes

VARIANTS = ("portable", "AVX2", "AVX-512", "AVX512-BF16", "AMX")
"""`Variant` of numbers.hpp; each includes the instructions of those before it.

The first three compute in float32 and give the same bits (above the least normal numbers). The
others use the processor's own bfloat16 dot products, each with bits of its own.
"""

WITHOUT_DOTS = 2
"""Last variant that computes in float32."""

INT8_VARIANTS = (*VARIANTS[:2], "AVX-VNNI", "AVX-512 with VNNI", "AMX in int8")
"""Variants of int8 rows, like `VARIANTS`; all have the same bits."""


def num_variants(library: ctypes.CDLL) -> int:
    """Return the number of `VARIANTS` that this processor runs."""
    best: int = library.lowtide_best_variant()
    return best + 1
