"""The compiled variant of a host whose weights stay, in part, packed: as GGUF files have them, or
checkpoints that other tools rounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowtide.formats import MatrixFormat, StoredMatrix
from lowtide.kernels.compiled import CompiledKernels
from lowtide.kernels.cpu.few_rows import FewRows
from lowtide.kernels.cpu.packed import PackedOperators
from lowtide.kernels.cpu.weight_calls import CompiledExperts, MatrixCall
from lowtide.kernels.operands import ClampedWeights, ExpertWeights, Matrix, SlotPlaces
from lowtide.kernels.several_experts import SeveralExperts


class PackedKernels(CompiledKernels):
    """Few rows are multiplied with weights as they are stored; more with tiles of them; rows that
    are rounded all with weights as they are stored."""

    def __init__(self, few_rows: FewRows, operators: PackedOperators[Any]) -> None:
        super().__init__(few_rows, rounds_rows=operators.rounds_rows)
        self._operators = operators

    def matrix_call(self, matrix: Matrix) -> MatrixCall | None:
        if self._operators.has(matrix):
            return self._operators.matrix_call(matrix)
        return super().matrix_call(matrix)

    def gated_mlp(
        self,
        x: Tensor,
        weights: ExpertWeights | ClampedWeights,
        gate: Tensor,
        up: Tensor,
        out: Tensor,
    ) -> None:
        several = self._one_expert(weights) if self._takes(x, gate, up, out) else None
        if several is None:
            super().gated_mlp(x, weights, gate, up, out)
            return
        experts, places = several
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        group = np.array([(0, 0, len(x))])
        experts.gated_mlps(group, places, out, gate, up, num_threads=1)

    def unpack(self, matrix: StoredMatrix, out: Tensor) -> None:
        is_taken = out.dtype is torch.bfloat16 and out.is_cpu and out.is_contiguous()
        if is_taken and self._operators.has(matrix):
            self._operators.unpack(matrix, out)
        else:
            super().unpack(matrix, out)

    def several_stored(self, formats: Sequence[MatrixFormat]) -> SeveralExperts | None:
        numbers = [self._operators.type_number(each) for each in formats]
        types = [number for number in numbers if number is not None]
        is_packed = any(map(self._operators.is_packed, formats))
        if not is_packed or len(types) < len(numbers):
            return None
        return self._operators.experts(types)

    def _takes(self, x: Tensor, *others: Tensor) -> bool:
        return self._operators.calls.takes(x) and all(each.is_contiguous() for each in others)

    def _one_expert(
        self, weights: ExpertWeights | ClampedWeights
    ) -> tuple[CompiledExperts, SlotPlaces] | None:
        """What computes an expert some of whose matrices are packed, as if it were in a slot."""
        if isinstance(weights, ClampedWeights) or not any(map(self._operators.has, weights)):
            return None
        found = [each for each in map(self._type_and_start, weights) if each is not None]
        if len(found) < len(weights):
            return None
        types, (gate, up, down) = zip(*found, strict=True)
        experts = self._operators.experts(types)
        return None if experts is None else (experts, SlotPlaces(gate, up, down, 0))

    def _type_and_start(self, matrix: Matrix) -> tuple[int, int] | None:
        if isinstance(matrix, Tensor):
            return self._operators.plain, matrix.data_ptr()
        call = self._operators.matrix_call(matrix) if self._operators.has(matrix) else None
        return None if call is None else (call.type, call.address)
