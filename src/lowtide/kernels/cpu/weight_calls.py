"""Operators over weights on the CPU, whatever these are stored in: what every kind has.

`signatures.hpp` says what the functions are given. A kind has types of its own, numbered; a row's
bits depend on the row, what it is used with and the variant alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtide.core import IntArray
from lowtide.kernels.cpu.library import functions_of
from lowtide.kernels.operands import SlotPlaces

_INT, _LONG, _P = ctypes.c_int, ctypes.c_long, ctypes.c_void_p
_TYPES = {
    "multiply": (None, _INT, _INT, _INT, _P, _LONG, _P, _P, _P, *4 * (_LONG,)),
    "mlps": (None, _INT, _INT, _P, _P, _LONG, *4 * (_P,), *2 * (_LONG,)),
    "experts": (None, _INT, _INT, *10 * (_P,), *4 * (_LONG,)),
}


class PlacesStruct(ctypes.Structure):
    """`ExpertPlaces` of signatures.hpp."""

    _fields_: ClassVar = [
        *((name, _P) for name in ("gate", "up", "down")),
        ("slot_bytes", _LONG),
        *((name, _P) for name in ("gate_bias", "up_bias", "down_bias")),
    ]


class ExpertCallStruct(ctypes.Structure):
    """`ExpertCall` of residency.hpp; the code that fills it in keeps alive what it points to."""

    _fields_: ClassVar = [
        *((name, _P) for name in ("run", "mlps")),
        *((name, _INT) for name in ("variant", "num_threads")),
        ("types", _P),
        ("places", PlacesStruct),
        *((name, _LONG) for name in ("hidden", "width", "num_rows", "num_chosen")),
        *((name, _P) for name in ("x", "parts", "gate", "up", "out")),
    ]


class WeightCalls:
    """A library's operators over weights of one kind, in one variant."""

    def __init__(self, library: ctypes.CDLL, kind: str, variant: int, max_rows: int) -> None:
        """kind: in the functions' names. max_rows: that a product takes."""
        self.variant, self.max_rows = variant, max_rows
        types = {f"{kind}_{name}": each for name, each in _TYPES.items()}
        self.multiply, self.mlps, self.experts = functions_of(library, types).values()
        self.multiply_address = ctypes.cast(self.multiply, _P).value
        self.mlps_address = ctypes.cast(self.mlps, _P).value
        self.experts_address = ctypes.cast(self.experts, _P).value

    def takes(self, x: Tensor) -> bool:
        """Whether the rows of `x` [rows, ...] are few, of the right type and in host memory."""
        return x.shape[0] <= self.max_rows and x.dtype is torch.bfloat16 and x.is_cpu


class MatrixCall(NamedTuple):
    """A matrix, and what multiplies few rows with it."""

    calls: WeightCalls
    type: int  # of the kind's
    address: int

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor, num_threads: int = 1) -> None:
        """`out = x @ matrix.t() + bias` for rows x [n, in] that `calls` take and out [n, out],
        bfloat16, the elements of a row adjacent; rounds once, after the bias.
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
    """Several experts of few rows each in one call, over slots whose matrices are of
    types of one kind.
    """

    def __init__(
        self, calls: WeightCalls, types: Sequence[int], max_rows: int | None = None
    ) -> None:
        """types: of gate, up and down. max_rows: of one expert, by default a product's."""
        self.calls = calls
        self.types = np.array(types, np.int32)
        self.max_rows = calls.max_rows if max_rows is None else max_rows

    def takes(self, x: Tensor) -> bool:
        """Whether `layer_call` takes these rows."""
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
        """`Kernels.gated_mlp` of several experts over their rows of `parts`, in place, bit for bit.

        groups [experts, 3] int64: each expert's slot, its first row and its number of rows, at
        most `max_rows`; no two share a row. parts [rows, hidden], which become outputs, and
        gate and up [rows, expert_size], scratch, are bfloat16. All of them contiguous.
        """
        of_slots = PlacesStruct(*places)
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
    ) -> ExpertCallStruct:
        """`Kernels.gated_mlp` of all experts of the tokens and `Kernels.combine`, bit for bit, but
        for which experts were chosen, of each token `num_chosen`, and their slots.

        x [tokens, hidden], which it `takes`; parts [tokens * num_chosen, hidden] and gate and up
        [tokens * num_chosen, expert_size] bfloat16 are scratch; out [tokens, hidden] float32. All
        of them contiguous; the caller keeps them while the experts run.
        """
        return ExpertCallStruct(
            self.calls.experts_address,
            self.calls.mlps_address,
            self.calls.variant,
            num_threads,
            self.types.ctypes.data,
            PlacesStruct(*places),
            x.shape[1],
            gate.shape[1],
            len(x),
            num_chosen,
            *(buffer.data_ptr() for buffer in (x, parts, gate, up, out)),
        )
