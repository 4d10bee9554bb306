"""CPU operators over a few bfloat16 rows, for decoding of one token or a handful.

A product of one row is limited by reading its weight, which torch does at half the speed of memory;
between products an operator of torch takes longer to call than to run (docs/log). The C++ beside
this file solves both, and divides a product or a layer's experts among threads.

`takes` says which rows are few. Operators between products take any number of rows, and divide them
among threads. A row's bits depend only on the row, its operands and the variant: not on other rows
or the number of threads.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from lowtide.config import DeltaNetSpec
from lowtide.kernels.cpu.library import functions_of, struct
from lowtide.kernels.cpu.variants import VARIANTS, num_variants
from lowtide.kernels.cpu.weight_calls import CompiledExperts, MatrixCall, WeightCalls
from lowtide.kernels.operands import DeltaRows, DeltaState, DeltaWeights, ExpertChoice
from lowtide.kernels.reference_delta import Heads
from lowtide.memory.workspace import Buffers

MAX_HEAD_DIM = 1024
"""`MAX_DIM` of attention.cpp; a latent of DeepSeek-V2 is 576 wide."""

_NO_TYPE = 0
"""Type number of bfloat16 weights, which have one type only."""

_INT, _FLOAT = ctypes.c_int, ctypes.c_float
_P, _LONG = ctypes.c_void_p, ctypes.c_long
_FUNCTIONS = {
    "attend": (None, _INT, _INT, *3 * (_P,), _LONG, _P, *5 * (_LONG,), _FLOAT, _P),
    "multiply_heads": (
        *(None, _INT, _INT, _P, _LONG, _LONG, _P, _LONG, _LONG, _INT),
        *(_P, _LONG, _LONG, *4 * (_LONG,)),
    ),
    "rms_norm": (None, _INT, _INT, _P, _LONG, _P, _FLOAT, _P, *4 * (_LONG,)),
    "rms_norm_in_float32": (None, _INT, _INT, _P, _LONG, _P, _FLOAT, _P, *4 * (_LONG,)),
    "rotate": (None, _INT, _INT, _P, _LONG, _P, _P, *4 * (_LONG,)),
    "rotate_in_float32": (None, _INT, _INT, _P, _LONG, _P, _P, *4 * (_LONG,)),
    "rotate_pairs": (None, _INT, _INT, _P, _LONG, _LONG, _P, _P, *3 * (_LONG,)),
    "silu_times": (None, _INT, _INT, _P, _P, _LONG),
    "weigh_rows": (None, _INT, _P, _P, _LONG, _LONG),
    "silu_weigh": (None, _INT, _INT, _P, _LONG, _P, _LONG, _LONG, _LONG),
    "sigmoid_weigh": (None, _INT, _INT, _P, _LONG, _P, *5 * (_LONG,)),
    "delta_steps": (None, _INT, _INT, _P, _P),
    "delta_prepare": (None, _INT, _INT, _P, _P, _P),
    "multiply_float32": (None, _INT, _INT, _P, _LONG, _P, _P, *4 * (_LONG,)),
    "choose_experts": (None, _INT, _P, _INT, *4 * (_P,), _LONG),
}


class FewRows:
    """Compiled operators in one variant."""

    def __init__(self, library: ctypes.CDLL, variant: int | None = None) -> None:
        """Bind the operators; variant: index in `VARIANTS`, by default the last that runs here."""
        self.library = library
        self.number = num_variants(library) - 1 if variant is None else variant
        self.variant = VARIANTS[self.number]
        # With more rows computation dominates, and torch's products are faster (docs/log).
        self.max_rows: int = library.lowtide_max_rows(self.number)
        self.calls = WeightCalls(library, "plain", self.number, self.max_rows)
        self.experts = CompiledExperts(self.calls, 3 * (_NO_TYPE,))
        self._functions = functions_of(library, _FUNCTIONS)

    def takes(self, x: Tensor) -> bool:
        """Return True if `x` [rows, ...] has few rows, bfloat16, in host memory."""
        return self.calls.takes(x)

    def takes_product(self, x: Tensor, weight_t: Tensor, out: Tensor) -> bool:
        """Return True if `multiply` supports these operands."""
        is_stored = weight_t.stride() == (1, x.shape[1])
        return self.takes(x) and is_stored and _has_rows(x, out)

    def takes_float32(self, x: Tensor, weight_t: Tensor, out: Tensor) -> bool:
        """Return True if `multiply_float32` supports these operands."""
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
        """Compute `Kernels.multiply`, rounded once, after the bias."""
        call = MatrixCall(self.calls, _NO_TYPE, weight_t.data_ptr())
        call.multiply(x, bias, out, num_threads)

    def matrix_call(self, weight: Tensor) -> MatrixCall | None:
        """Return the call that multiplies with `weight` [out, in].

        None unless the weight is bfloat16 in host memory with contiguous rows.
        """
        is_taken = weight.dtype is torch.bfloat16 and weight.is_cpu and weight.is_contiguous()
        return MatrixCall(self.calls, _NO_TYPE, weight.data_ptr()) if is_taken else None

    def multiply_float32(
        self, x: Tensor, weight_t: Tensor, out: Tensor, num_threads: int = 1
    ) -> None:
        """Compute `Kernels.multiply` in float32 throughout."""
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
        sinks: Tensor | None = None,
    ) -> None:
        """Compute `Kernels.attend_row`, softmax and sums in float32."""
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
            head_dim,
            head_dim**-0.5 if scale is None else scale,
            None if sinks is None else sinks.data_ptr(),
        )

    def multiply_heads(self, x: Tensor, weight: Tensor, out: Tensor, num_threads: int = 1) -> None:
        """Compute `Kernels.multiply_heads`; the elements of a head of x and of out are adjacent."""
        num_rows, num_heads, num_k = x.shape
        by_outs = weight.stride(2) != 1
        self._functions["multiply_heads"](
            self.number,
            num_threads,
            x.data_ptr(),
            x.stride(0),
            x.stride(1),
            weight.data_ptr(),
            weight.stride(0),
            weight.stride(1) if not by_outs else weight.stride(2),
            by_outs,
            out.data_ptr(),
            out.stride(0),
            out.stride(1),
            num_rows,
            num_heads,
            out.shape[2],
            num_k,
        )

    def takes_heads(self, x: Tensor, weight: Tensor) -> bool:
        """Return True if `multiply_heads` supports these operands."""
        is_stored = weight.stride(2) == 1 or weight.stride()[1:] == (1, x.shape[2])
        return self.takes(x) and x.stride(2) == 1 and is_stored and is_on_host(weight)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, out: Tensor, num_threads: int = 1
    ) -> None:
        """Compute `Kernels.rms_norm` of any number of rows.

        x, out [rows, length] or [rows, heads, length], heads adjacent; weight [length] bfloat16 or
        float32.
        """
        length, is_wide = weight.shape[0], weight.dtype is torch.float32
        self._functions["rms_norm_in_float32" if is_wide else "rms_norm"](
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
        """Compute `Kernels.rotate` of any number of rows, bit for bit.

        Heads are adjacent; cos and sin are contiguous, bfloat16 or float32.
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

    def rotate_pairs(self, x: Tensor, cos: Tensor, sin: Tensor, num_threads: int = 1) -> None:
        """Compute `Kernels.rotate_pairs` of any number of rows, bit for bit.

        The elements of a head are adjacent; cos and sin are contiguous, float32.
        """
        self._functions["rotate_pairs"](
            self.number,
            num_threads,
            x.data_ptr(),
            x.stride(0),
            x.stride(1),
            cos.data_ptr(),
            sin.data_ptr(),
            *x.shape[:2],
            cos.shape[2],
        )

    def silu_times(self, gate: Tensor, up: Tensor, num_threads: int = 1) -> None:
        """Compute `Kernels.silu_times` of any number of rows."""
        addresses = gate.data_ptr(), up.data_ptr()
        self._functions["silu_times"](self.number, num_threads, *addresses, gate.numel())

    def weigh_rows(self, x: Tensor, gates: Tensor) -> None:
        """Compute `Kernels.weigh_rows`; gates stay unchanged."""
        addresses = x.data_ptr(), gates.data_ptr()
        self._functions["weigh_rows"](self.number, *addresses, *x.shape)

    def silu_weigh(self, x: Tensor, gates: Tensor, num_threads: int = 1) -> None:
        """Compute `x *= silu(gates)` in float32 and rounded once, of any number of rows.

        x, gates [rows, heads, length], heads adjacent.
        """
        num_rows, num_heads, length = x.shape
        self._functions["silu_weigh"](
            self.number,
            num_threads,
            x.data_ptr(),
            x.stride(0),
            gates.data_ptr(),
            gates.stride(0),
            num_rows,
            num_heads * length,
        )

    def sigmoid_weigh(self, x: Tensor, gates: Tensor, num_threads: int = 1) -> None:
        """Compute `Kernels.sigmoid_weigh` of any number of rows; heads of x are adjacent."""
        self._functions["sigmoid_weigh"](
            self.number,
            num_threads,
            x.data_ptr(),
            x.stride(0),
            gates.data_ptr(),
            *gates.stride()[:2],
            *x.shape,
        )

    def delta_steps(
        self,
        rows: DeltaRows,
        weights: DeltaWeights,
        before: DeltaState,
        after: DeltaState,
        out: Tensor,
        num_threads: int = 1,
    ) -> None:
        """Compute `Kernels.delta_steps`.

        Elements of rows are adjacent; weights and states are contiguous.
        """
        of_rows = _delta_rows(rows, before.tail, after.tail)
        of_rows.before, of_rows.after = before.matrices.data_ptr(), after.matrices.data_ptr()
        of_rows.out, of_rows.out_stride = out.data_ptr(), out.stride(0)
        of_weights = delta_weights_struct(weights)
        self._functions["delta_steps"](
            self.number, num_threads, ctypes.addressof(of_rows), ctypes.addressof(of_weights)
        )

    def delta_prepare(
        self,
        rows: DeltaRows,
        weights: DeltaWeights,
        before: Tensor,
        after: Tensor,
        heads: Heads,
        workspace: Buffers,
        num_threads: int = 1,
    ) -> None:
        """Compute `reference_delta.Prepare` without scratch; what must be adjacent is as above."""
        of_rows, of_weights = _delta_rows(rows, before, after), delta_weights_struct(weights)
        chunk = struct("DeltaChunk")(*(each.data_ptr() for each in heads[:4]))
        addresses = (ctypes.addressof(each) for each in (of_rows, of_weights, chunk))
        self._functions["delta_prepare"](self.number, num_threads, *addresses)

    def choose_experts(
        self, logits: Tensor, bias: Tensor | None, choice: ExpertChoice
    ) -> tuple[Tensor, Tensor]:
        """Compute `Kernels.choose_experts` of any number of rows; ties go to the first expert.

        logits: bfloat16 or float32, contiguous; they stay unchanged.
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
    """Return True if x is bfloat16 in host memory."""
    return x.dtype is torch.bfloat16 and x.is_cpu


def _delta_rows(rows: DeltaRows, tail_before: Tensor, tail_after: Tensor) -> ctypes.Structure:
    """Convert rows and tails for C++, without matrices and what is read of them."""
    mixed, beta, time = rows
    return struct("DeltaRows")(
        mixed=mixed.data_ptr(),
        mixed_stride=mixed.stride(0),
        beta=beta.data_ptr(),
        beta_stride=beta.stride(0),
        time=time.data_ptr(),
        time_stride=time.stride(0),
        tail_before=tail_before.data_ptr(),
        tail_after=tail_after.data_ptr(),
        num_rows=len(mixed),
    )


def delta_weights_struct(weights: DeltaWeights) -> ctypes.Structure:
    """Convert weights for C++; the tensors have to outlive what is made."""
    return struct("DeltaWeights")(
        spec=_delta_spec(weights.spec),
        conv=weights.conv.data_ptr(),
        decay=weights.decay.data_ptr(),
        time_bias=weights.time_bias.data_ptr(),
    )


@functools.cache
def _delta_spec(spec: DeltaNetSpec) -> ctypes.Structure:
    return struct("DeltaSpec")(
        key_heads=spec.key_heads,
        value_heads=spec.value_heads,
        key_width=spec.key_width,
        value_width=spec.value_width,
        kernel=spec.kernel,
        is_tiled=spec.is_tiled,
    )


@functools.cache
def choice_struct(choice: ExpertChoice, num_experts: int) -> ctypes.Structure:
    """Convert a choice for C++; cached, since every layer of every pass asks for it."""
    return struct("Choice")(num_experts=num_experts, **choice._asdict())


def _has_rows(x: Tensor, out: Tensor) -> bool:
    """Return True if the elements of each row are adjacent."""
    return x.stride(1) == 1 and out.stride(1) == 1
