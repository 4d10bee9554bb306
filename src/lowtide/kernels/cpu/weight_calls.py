"""CPU operators over weights, common to all kinds of storage.

The functions have the signatures of `signatures.hpp`. Each kind numbers its own types. A row's bits
depend only on the row, its operands and the variant.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtide.core import IntArray
from lowtide.kernels.cpu.library import functions_of, struct
from lowtide.kernels.operands import SlotPlaces

_INT, _LONG, _P = ctypes.c_int, ctypes.c_long, ctypes.c_void_p
_TYPES = {
    "multiply": (None, _INT, _INT, _INT, _P, _LONG, _P, _P, _P, *4 * (_LONG,)),
    "mlps": (None, _INT, _INT, _P, _P, _LONG, *4 * (_P,), *2 * (_LONG,)),
    "experts": (None, _INT, _INT, *10 * (_P,), *4 * (_LONG,)),
}


class WeightCalls:
    """Operators of a library over one kind of weights, in one variant."""

    def __init__(self, library: ctypes.CDLL, kind: str, variant: int, max_rows: int) -> None:
        """Bind the operators.

        kind: part of the functions' names. max_rows: most rows of a product.
        """
        self.variant, self.max_rows = variant, max_rows
        types = {f"{kind}_{name}": each for name, each in _TYPES.items()}
        self.multiply, self.mlps, self.experts = functions_of(library, types).values()
        self.multiply_address = ctypes.cast(self.multiply, _P).value
        self.mlps_address = ctypes.cast(self.mlps, _P).value
        self.experts_address = ctypes.cast(self.experts, _P).value

    def takes(self, x: Tensor) -> bool:
        """Return True if `x` [rows, ...] has few rows, bfloat16, in host memory."""
        return x.shape[0] <= self.max_rows and x.dtype is torch.bfloat16 and x.is_cpu


class MatrixCall(NamedTuple):
    """Matrix with the operators that multiply few rows with it."""

    calls: WeightCalls
    type: int  # of the kind's
    address: int

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor, num_threads: int = 1) -> None:
        """Compute `out = x @ matrix.t() + bias`, rounded once, after the bias.

        x [n, in] must be accepted by `calls.takes`; out [n, out]; bfloat16, the elements of a row
        adjacent.
        """
        num_rows, num_k = x.shape
        self.calls.multiply(
            self.calls.variant,
            num_threads,
            self.type,
            x.data_ptr(),
            x.stride(0),
            self.address,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            num_rows,
            out.shape[1],
            num_k,
        )


class CompiledExperts:
    """Several experts of few rows each in one call.

    The slots' matrices have types of one kind.
    """

    def __init__(
        self, calls: WeightCalls, types: Sequence[int], max_rows: int | None = None
    ) -> None:
        """Bind the operators; types: of gate, up and down; max_rows: most rows of one expert.

        By default as many as a product's.
        """
        self.calls = calls
        self.types = np.array(types, np.int32)
        self.max_rows = calls.max_rows if max_rows is None else max_rows

    def takes(self, x: Tensor) -> bool:
        """Return True if `layer_call` supports these rows."""
        return self.calls.takes(x) and x.shape[0] <= self.max_rows

    def gated_mlps(
        self,
        groups: IntArray,
        places: SlotPlaces,
        parts: Tensor,
        gate: Tensor,
        up: Tensor,
        num_threads: int,
    ) -> None:
        """Compute `Kernels.gated_mlp` of several experts on their rows of `parts`, in place.

        The bits are the same. groups [experts, 3] int64: each expert's slot, first row and number
        of rows, at most `max_rows`; no two share a row. parts [rows, hidden] become the outputs;
        gate and up [rows, expert_size] are scratch. All are bfloat16 and contiguous.
        """
        of_slots = struct("ExpertPlaces")(*places)
        self.calls.mlps(
            self.calls.variant,
            num_threads,
            self.types.ctypes.data,
            groups.ctypes.data,
            len(groups),
            ctypes.addressof(of_slots),
            parts.data_ptr(),
            gate.data_ptr(),
            up.data_ptr(),
            parts.shape[1],
            gate.shape[1],
        )

    def layer_call(
        self,
        x: Tensor,
        num_chosen: int,
        places: SlotPlaces,
        parts: Tensor,
        gate: Tensor,
        up: Tensor,
        out: Tensor,
        num_threads: int,
    ) -> ctypes.Structure:
        """Prepare an `ExpertCall`: `gated_mlp` of all of the tokens' experts and `combine`.

        The bits are the same. The experts and their slots are given later; each token has
        `num_chosen`. x [tokens, hidden], accepted by `takes`; parts [tokens * num_chosen, hidden]
        and gate and up [tokens * num_chosen, expert_size] are bfloat16 scratch; out [tokens,
        hidden] float32. All are contiguous; the caller keeps them alive while the experts run.
        """
        return struct("ExpertCall")(
            self.calls.experts_address,
            self.calls.mlps_address,
            self.calls.variant,
            num_threads,
            self.types.ctypes.data,
            struct("ExpertPlaces")(*places),
            x.shape[1],
            gate.shape[1],
            len(x),
            num_chosen,
            *(buffer.data_ptr() for buffer in (x, parts, gate, up, out)),
        )
