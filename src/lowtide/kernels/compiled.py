"""Kernels of a CPU that computes in bfloat16, compiled from C++, with weights in any format.

Products of few rows go to the compiled operators, products of more rows to torch; the limit depends
on the processor (`FewRows.max_rows`). The two add sums in another order and so give different bits;
therefore an engine uses one variant throughout. Operators between products are compiled for any
number of rows.

Few rows are multiplied with packed weights as stored, more rows with unpacked tiles. Rows rounded
to int8 are always multiplied with weights as stored.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from lowtide.formats import MatrixFormat, StoredMatrix
from lowtide.kernels import reference_delta
from lowtide.kernels.cpu.few_rows import MAX_HEAD_DIM, FewRows, is_on_host
from lowtide.kernels.cpu.layer import CompiledLayer
from lowtide.kernels.cpu.packed import PLAIN, SECTIONS, PackedOperators, type_number
from lowtide.kernels.cpu.weight_calls import CompiledExperts, MatrixCall
from lowtide.kernels.int8_rows import GroupedMatrix
from lowtide.kernels.layer_parts import LayerParts
from lowtide.kernels.operands import (
    AnyWeights,
    DeltaRows,
    DeltaState,
    DeltaWeights,
    ExpertChoice,
    ExpertWeights,
    Matrix,
    Rotation,
    SlotPlaces,
)
from lowtide.kernels.reference import Kernels
from lowtide.kernels.tiled_head import Run
from lowtide.memory.workspace import Buffers


def compiled_name(variant: str) -> str:
    """Return the `Kernels.name` of one of `VARIANTS`."""
    return f"compiled, {variant}"


class CompiledKernels(Kernels):
    """Kernels that use compiled operators wherever `FewRows` supports the operands."""

    def __init__(
        self,
        few_rows: FewRows,
        packed: PackedOperators,
        rounding: PackedOperators | None = None,
        rounded: Collection[str] = (),
    ) -> None:
        """Wrap the operators.

        rounding: operators that round rows to int8, for weights in the formats that `rounded`
        names; None: no rows are rounded.
        """
        super().__init__(rounded, compiled_name(few_rows.variant))
        self._few_rows, self._packed, self._rounding = few_rows, packed, rounding
        self.library = few_rows.library

    def multiply(
        self, x: Tensor, weight_t: Tensor, bias: Tensor | None, out: Tensor, num_threads: int = 1
    ) -> None:
        if self._few_rows.takes_product(x, weight_t, out):
            self._few_rows.multiply(x, weight_t, bias, out, num_threads)
        elif bias is None and self._few_rows.takes_float32(x, weight_t, out):
            self._few_rows.multiply_float32(x, weight_t, out, num_threads)
        else:
            super().multiply(x, weight_t, bias, out)

    def matrix_call(self, matrix: Matrix, is_rounded: bool | None = None) -> MatrixCall | None:
        """Return the call that multiplies few rows with a matrix; None if no compiled one can.

        is_rounded: see `multiply_by`.
        """
        if isinstance(matrix, Tensor):
            return self._few_rows.matrix_call(matrix)
        rounds = self.rounds(matrix) if is_rounded is None else is_rounded
        return self._operators(rounds and isinstance(matrix, GroupedMatrix)).matrix_call(matrix)

    def unpack(self, matrix: StoredMatrix, out: Tensor) -> None:
        is_taken = out.dtype is torch.bfloat16 and out.is_cpu and out.is_contiguous()
        if is_taken and self._packed.has(matrix):
            self._packed.unpack(matrix, out)
        else:
            super().unpack(matrix, out)

    def several_experts(self, formats: Sequence[MatrixFormat]) -> CompiledExperts | None:
        found = [type_number(self.library, each) for each in formats]
        types = [each for each in found if each is not None]
        if len(types) < len(found):
            return None
        names = {own.name for own, number in zip(formats, types, strict=True) if number < SECTIONS}
        return self._experts(types, bool(names) and names <= self.rounded)

    def multiply_by(
        self,
        x: Tensor,
        matrix: Matrix,
        out: Tensor,
        bias: Tensor | None = None,
        num_threads: int = 1,
        is_rounded: bool | None = None,
    ) -> None:
        call = None if isinstance(matrix, Tensor) else self.matrix_call(matrix, is_rounded)
        if call is not None and call.calls.takes(x) and x.stride(1) == out.stride(1) == 1:
            call.multiply(x, bias, out, num_threads)
        else:
            super().multiply_by(x, matrix, out, bias, num_threads, is_rounded)

    def divides(self, x: Tensor, matrix: Matrix) -> bool:
        call = self.matrix_call(matrix)
        return call is not None and call.calls.takes(x)

    def whole_layer(self, parts: LayerParts) -> CompiledLayer | None:
        return CompiledLayer.of(self._few_rows, parts, self.matrix_call)

    def takes_rows(self, x: Tensor) -> bool:
        return self._few_rows.takes(x)

    def gated_mlp(
        self,
        x: Tensor,
        weights: AnyWeights,
        gate: Tensor,
        up: Tensor,
        out: Tensor,
    ) -> None:
        expert = self._one_expert(weights)
        if expert is None or not _are_taken(expert[0], x, gate, up, out):
            super().gated_mlp(x, weights, gate, up, out)
            return
        experts, places = expert
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        group = np.array([(0, 0, len(x))])
        experts.gated_mlps(group, places, out, gate, up, num_threads=1)

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        workspace: Buffers,
        out: Tensor,
        num_threads: int = 1,
    ) -> None:
        if is_on_host(x) and weight.dtype in (torch.bfloat16, torch.float32):
            self._few_rows.rms_norm(x, weight, eps, out, num_threads)
        else:
            super().rms_norm(x, weight, eps, workspace, out)

    def rotate(
        self, x: Tensor, rotation: Rotation, workspace: Buffers, num_threads: int = 1
    ) -> None:
        are_adjacent = x.shape[1] == 1 or x.stride(1) == x.shape[2]  # heads
        if is_on_host(x) and are_adjacent:
            self._few_rows.rotate(x, *rotation, num_threads)
        else:
            super().rotate(x, rotation, workspace)

    def rotate_pairs(
        self, x: Tensor, rotation: Rotation, workspace: Buffers, num_threads: int = 1
    ) -> None:
        if is_on_host(x):
            self._few_rows.rotate_pairs(x, *rotation, num_threads)
        else:
            super().rotate_pairs(x, rotation, workspace)

    def multiply_heads(
        self, x: Tensor, weight: Tensor, out: Tensor, workspace: Buffers, num_threads: int = 1
    ) -> None:
        if self._few_rows.takes_heads(x, weight) and out.stride(2) == 1:
            self._few_rows.multiply_heads(x, weight, out, num_threads)
        else:
            super().multiply_heads(x, weight, out, workspace)

    def silu_times(self, gate: Tensor, up: Tensor, num_threads: int = 1) -> None:
        if is_on_host(gate) and gate.is_contiguous() and up.is_contiguous():
            self._few_rows.silu_times(gate, up, num_threads)
        else:
            super().silu_times(gate, up)

    def weigh_rows(self, x: Tensor, gates: Tensor) -> None:
        if self._few_rows.takes(x):
            self._few_rows.weigh_rows(x, gates)
        else:
            super().weigh_rows(x, gates)

    def gated_norm(
        self,
        x: Tensor,
        gates: Tensor,
        weight: Tensor,
        eps: float,
        workspace: Buffers,
        num_threads: int = 1,
    ) -> None:
        if is_on_host(x) and is_on_host(gates):
            self.rms_norm(x, weight, eps, workspace, x, num_threads)
            self._few_rows.silu_weigh(x, gates, num_threads)
        else:
            super().gated_norm(x, gates, weight, eps, workspace, num_threads)

    def sigmoid_weigh(self, x: Tensor, gates: Tensor, num_threads: int = 1) -> None:
        if is_on_host(x) and is_on_host(gates):
            self._few_rows.sigmoid_weigh(x, gates, num_threads)
        else:
            super().sigmoid_weigh(x, gates, num_threads)

    def delta_steps(
        self,
        rows: DeltaRows,
        weights: DeltaWeights,
        before: DeltaState,
        after: DeltaState,
        out: Tensor,
        workspace: Buffers,
        num_threads: int = 1,
    ) -> None:
        if is_on_host(rows.mixed):
            self._few_rows.delta_steps(rows, weights, before, after, out, num_threads)
        else:
            super().delta_steps(rows, weights, before, after, out, workspace, num_threads)

    def delta_chunk(
        self,
        rows: DeltaRows,
        weights: DeltaWeights,
        before: DeltaState,
        after: DeltaState,
        out: Tensor,
        workspace: Buffers,
        run: Run,
        num_threads: int = 1,
    ) -> None:
        prepare = reference_delta.prepare
        if is_on_host(rows.mixed):
            prepare = partial(self._few_rows.delta_prepare, num_threads=num_threads)
        reference_delta.advance(rows, weights, before, after, out, workspace, run, prepare)

    def choose_experts(
        self, logits: Tensor, bias: Tensor | None, choice: ExpertChoice
    ) -> tuple[Tensor, Tensor]:
        if logits.is_cpu:
            return self._few_rows.choose_experts(logits, bias, choice)
        return super().choose_experts(logits, bias, choice)

    def attends_rows(self, query: Tensor) -> bool:
        return is_on_host(query) and query.shape[2] <= MAX_HEAD_DIM

    def attend_row(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float | None,
        out: Tensor,
        num_threads: int,
        sinks: Tensor | None = None,
    ) -> None:
        self._few_rows.attend(query, keys, values, scale, out, num_threads, sinks)

    def _operators(self, rounds: bool) -> PackedOperators:
        return self._rounding if rounds and self._rounding is not None else self._packed

    def _experts(self, types: Sequence[int], are_rounded: bool) -> CompiledExperts | None:
        if {*types} == {PLAIN}:
            return self._few_rows.experts
        return self._operators(are_rounded).experts(types)

    def _one_expert(self, weights: AnyWeights) -> tuple[CompiledExperts, SlotPlaces] | None:
        """Return the call that computes one expert, addressed as if it were in a slot."""
        if not isinstance(weights, ExpertWeights):
            return None
        are_rounded = self.rounds(*weights)
        calls = [self.matrix_call(each, are_rounded) for each in weights]
        found = [
            (PLAIN if isinstance(matrix, Tensor) else call.type, call.address)
            for matrix, call in zip(weights, calls, strict=True)
            if call is not None
        ]
        if len(found) < len(weights):
            return None
        types, (gate, up, down) = zip(*found, strict=True)
        experts = self._experts(types, are_rounded)
        return None if experts is None else (experts, SlotPlaces(gate, up, down, 0))


def _are_taken(experts: CompiledExperts, x: Tensor, *others: Tensor) -> bool:
    return experts.calls.takes(x) and all(each.is_contiguous() for each in others)
