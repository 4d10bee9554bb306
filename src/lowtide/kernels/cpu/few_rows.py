"""Operators of a few bfloat16 rows on the CPU: decoding one token, or a handful.

A product of one row is a matter of reading its weight, which torch's does at half the speed of
memory; between products an operator of torch takes longer to call than to run (docs/log). The
C++ beside this file does both, and shares a product or a layer's experts among threads.

`takes` tells which rows are few. What comes between products takes many, too, and shares those
among threads. A row's bits depend on the row, what it is used with and the variant alone: not on
other rows or on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
from typing import ClassVar

import torch
from torch import Tensor

from lowtide.kernels.cpu.library import functions_of
from lowtide.kernels.cpu.weight_calls import CompiledExperts, MatrixCall, WeightCalls
from lowtide.kernels.operands import ExpertChoice

MAX_HEAD_DIM = 1024
"""`MAX_DIM` of attention.cpp; a latent of DeepSeek-V2 is 576 wide."""

_NO_TYPE = 0
"""The type number of weights in bfloat16, which have only one type."""

_INT, _FLOAT = ctypes.c_int, ctypes.c_float
_P, _LONG = ctypes.c_void_p, ctypes.c_long
_FUNCTIONS = {
    "attend": (None, _INT, _INT, *3 * (_P,), _LONG, _P, *4 * (_LONG,), _FLOAT),
    "rms_norm": (None, _INT, _INT, _P, _LONG, _P, _FLOAT, _P, *4 * (_LONG,)),
    "rotate": (None, _INT, _INT, _P, _LONG, _P, _P, *4 * (_LONG,)),
    "rotate_in_float32": (None, _INT, _INT, _P, _LONG, _P, _P, *4 * (_LONG,)),
    "silu_times": (None, _INT, _INT, _P, _P, _LONG),
    "weigh_rows": (None, _INT, _P, _P, _LONG, _LONG),
    "multiply_float32": (None, _INT, _INT, _P, _LONG, _P, _P, *4 * (_LONG,)),
    "choose_experts": (None, _INT, _P, _INT, *4 * (_P,), _LONG),
}


VARIANTS = ("portable", "AVX2", "AVX-512", "AVX512-BF16", "AMX")
"""`Variant` of numbers.hpp. Each has all that is before it. The first three compute in float32 and
give the same bits (above the least normal numbers), the others by the processor's own dot products
of bfloat16 numbers, each with bits of its own."""

WITHOUT_DOTS = 2
"""The last of those that compute in float32."""


def num_variants(library: ctypes.CDLL) -> int:
    """How many of `VARIANTS` this processor runs."""
    best: int = library.lowtide_best_variant()
    return best + 1


class FewRows:
    """The compiled operators in one of their variants."""

    def __init__(self, library: ctypes.CDLL, variant: int | None = None) -> None:
        """variant: of `VARIANTS` one that runs here, by default the last of them."""
        self.library = library
        self.number = num_variants(library) - 1 if variant is None else variant
        self.variant = VARIANTS[self.number]
        # With more rows computing is the work, and torch's products are faster (docs/log).
        self.max_rows: int = library.lowtide_max_rows(self.number)
        self.calls = WeightCalls(library, "plain", self.number, self.max_rows)
        self.experts = CompiledExperts(self.calls, 3 * (_NO_TYPE,))
        self._functions = functions_of(library, _FUNCTIONS)

    def takes(self, x: Tensor) -> bool:
        """Whether the rows of `x` [rows, ...] are few, of the right type and in host memory."""
        return self.calls.takes(x)

    def takes_product(self, x: Tensor, weight_t: Tensor, out: Tensor) -> bool:
        """Whether `multiply` takes these."""
        is_stored = weight_t.stride() == (1, x.shape[1])
        return self.takes(x) and is_stored and _has_rows(x, out)

    def takes_float32(self, x: Tensor, weight_t: Tensor, out: Tensor) -> bool:
        """Whether `multiply_float32` takes these."""
        is_float32 = x.dtype is weight_t.dtype is torch.float32
        is_stored = weight_t.stride() == (1, x.shape[1])
        return (
            is_float32 and x.is_cpu and len(x) <= self.max_rows and is_stored and _has_rows(x, out)
        )

    def multiply(
        self,
        x: Tensor,
        weight_t: Tensor,
        bias: Tensor | None,
        out: Tensor,
        num_threads: int = 1,
    ) -> None:
        """See `Kernels.multiply`; rounds once, after the bias."""
        call = MatrixCall(self.calls, _NO_TYPE, weight_t.data_ptr())
        call.multiply(x, bias, out, num_threads)

    def matrix_call(self, weight: Tensor) -> MatrixCall | None:
        """What multiplies with `weight` [out, in]; None where it has not its rows one after the
        other in host memory, in bfloat16.
        """
        is_taken = weight.dtype is torch.bfloat16 and weight.is_cpu and weight.is_contiguous()
        return MatrixCall(self.calls, _NO_TYPE, weight.data_ptr()) if is_taken else None

    def multiply_float32(
        self, x: Tensor, weight_t: Tensor, out: Tensor, num_threads: int = 1
    ) -> None:
        """See `Kernels.multiply`; all in float32."""
        num_rows, num_k = x.shape
        self._functions["multiply_float32"](
            self.number,
            num_threads,
            x.data_ptr(),
            x.stride(0),
            weight_t.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            num_rows,
            out.shape[1],
            num_k,
        )

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float | None,
        out: Tensor,
        num_threads: int,
    ) -> None:
        """See `Kernels.attend_row`; softmax and sums in float32."""
        kv_heads, num_tokens, head_dim = keys.shape
        self._functions["attend"](
            self.number,
            num_threads,
            query.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            keys.stride(0),
            out.data_ptr(),
            kv_heads,
            query.shape[0] // kv_heads,
            num_tokens,
            head_dim,
            head_dim**-0.5 if scale is None else scale,
        )

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, out: Tensor, num_threads: int = 1
    ) -> None:
        """See `Kernels.rms_norm`, of any number of rows. x, out [rows, length] or [rows, heads,
        length], heads adjacent; weight [length] bfloat16.
        """
        length = weight.shape[0]
        self._functions["rms_norm"](
            self.number,
            num_threads,
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            out.stride(0),
            x.shape[0],
            x.shape[1] if x.dim() == 3 else 1,
            length,
        )

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, num_threads: int = 1) -> None:
        """See `Kernels.rotate`, whose bits these are, of any number of rows. Heads are adjacent,
        cos and sin bfloat16 or float32 and contiguous.
        """
        is_wide = cos.dtype is torch.float32
        self._functions["rotate_in_float32" if is_wide else "rotate"](
            self.number,
            num_threads,
            x.data_ptr(),
            x.stride(0),
            cos.data_ptr(),
            sin.data_ptr(),
            *x.shape,
            cos.shape[2],
        )

    def silu_times(self, gate: Tensor, up: Tensor, num_threads: int = 1) -> None:
        """See `Kernels.silu_times`, of any number of rows."""
        addresses = gate.data_ptr(), up.data_ptr()
        self._functions["silu_times"](self.number, num_threads, *addresses, gate.numel())

    def weigh_rows(self, x: Tensor, gates: Tensor) -> None:
        """See `Kernels.weigh_rows`; gates stay as they are."""
        addresses = x.data_ptr(), gates.data_ptr()
        self._functions["weigh_rows"](self.number, *addresses, *x.shape)

    def choose_experts(
        self, logits: Tensor, bias: Tensor | None, choice: ExpertChoice
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels.choose_experts`, of any number of rows; of equal ranks the first experts.

        logits: bfloat16 or float32, contiguous, which stay as they are.
        """
        num_rows, num_experts = logits.shape
        experts = torch.empty((num_rows, choice.num_chosen), dtype=torch.int64)
        weights = torch.empty((num_rows, choice.num_chosen), dtype=torch.float32)
        self._functions["choose_experts"](
            self.number,
            logits.data_ptr(),
            logits.dtype is torch.float32,
            None if bias is None else bias.data_ptr(),
            ctypes.addressof(choice_struct(choice, num_experts)),
            experts.data_ptr(),
            weights.data_ptr(),
            num_rows,
        )
        return experts, weights


def is_on_host(x: Tensor) -> bool:
    """Whether x is bfloat16 in host memory."""
    return x.dtype is torch.bfloat16 and x.is_cpu


class ChoiceStruct(ctypes.Structure):
    """`Choice` of operators.hpp."""

    _fields_: ClassVar = [
        ("num_experts", _LONG),
        ("num_chosen", _LONG),
        ("num_groups", _LONG),
        ("num_groups_kept", _LONG),
        ("num_group_best", _LONG),
        ("is_sigmoid", _INT),
        ("normalise", _INT),
        ("rounds_weights", _INT),
        ("scaling_factor", _FLOAT),
    ]


@functools.cache
def choice_struct(choice: ExpertChoice, num_experts: int) -> ChoiceStruct:
    """As C++ takes it; kept, since every layer of every pass asks for it."""
    return ChoiceStruct(
        num_experts,
        choice.num_chosen,
        choice.num_groups,
        choice.num_groups_kept,
        choice.num_group_best,
        choice.is_sigmoid,
        choice.normalise,
        choice.rounds_weights,
        choice.scaling_factor,
    )


def _has_rows(x: Tensor, out: Tensor) -> bool:
    """Whether the elements of each row are adjacent."""
    return x.stride(1) == 1 and out.stride(1) == 1
