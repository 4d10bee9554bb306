"""Products of a few bfloat16 rows on the CPU, by `few_rows.cpp`; all others by the reference.

A product of one row is a matter of reading its weight, which torch's does at half the speed of
memory (docs/log.md).
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from lowtide.kernels import reference
from lowtide.kernels.cpu.library import load_library
from lowtide.kernels.reference import ClampedWeights, ExpertWeights

MAX_ROWS = 8
"""With more rows computing is the work, and torch's products are faster (docs/log.md)."""

_INT, _POINTER, _LONG = ctypes.c_int, ctypes.c_void_p, ctypes.c_long


class FewRows:
    """The compiled products in one of their variants. All variants give the same bits.

    A row's bits depend on the row and the weights alone: not on other rows, nor on how output
    features are divided.
    """

    def __init__(self, library: ctypes.CDLL, variant: int | None = None) -> None:
        """variant: from 0, portable, to `num_variants - 1`, the best of this CPU and default."""
        self.num_variants = library.lowtide_best_variant() + 1
        self._variant = self.num_variants - 1 if variant is None else variant
        # Functions of their own: those of the library's attributes are shared.
        self._multiply = library["lowtide_multiply"]
        self._multiply.argtypes = (_INT, _POINTER, _LONG, *3 * (_POINTER,), *4 * (_LONG,))
        self._multiply.restype = None
        self._gated_mlp = library["lowtide_gated_mlp"]
        self._gated_mlp.argtypes = (_INT, _POINTER, _LONG, *6 * (_POINTER,), *4 * (_LONG,))
        self._gated_mlp.restype = None

    @classmethod
    def load(cls) -> FewRows:
        """Compiled now, or from the cache. Raises UnsupportedError or StorageError."""
        return cls(load_library(Path(__file__).with_suffix(".cpp")))

    def multiply(self, x: Tensor, weight_t: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """See `reference.multiply`; rounds once, after the bias."""
        num_rows, num_k = x.shape
        if not (_is_few(x) and weight_t.stride() == (1, num_k) and _has_rows(x, out)):
            reference.multiply(x, weight_t, bias, out)
            return
        self._multiply(
            self._variant,
            x.data_ptr(),
            x.stride(0),
            weight_t.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            num_rows,
            out.shape[1],
            num_k,
        )

    def gated_mlp(
        self,
        x: Tensor,
        weights: ExpertWeights | ClampedWeights,
        gate: Tensor,
        up: Tensor,
        out: Tensor,
    ) -> None:
        """See `reference.gated_mlp`; rounds in the same places. Weights are contiguous."""
        if isinstance(weights, ClampedWeights):
            reference.clamped_mlp(x, weights, gate, up, out, self.multiply)
            return
        if not (_is_few(x) and _has_rows(x, out) and gate.is_contiguous() and up.is_contiguous()):
            reference.gated_mlp(x, weights, gate, up, out)
            return
        self._gated_mlp(
            self._variant,
            x.data_ptr(),
            x.stride(0),
            weights.gate.data_ptr(),
            weights.up.data_ptr(),
            weights.down.data_ptr(),
            gate.data_ptr(),
            up.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            *x.shape,
            gate.shape[1],
        )


def _is_few(x: Tensor) -> bool:
    return x.dtype is torch.bfloat16 and x.shape[0] <= MAX_ROWS and x.is_cpu


def _has_rows(x: Tensor, out: Tensor) -> bool:
    """Whether the elements of each row are adjacent."""
    return x.stride(1) == 1 and out.stride(1) == 1
