"""The compiled variant of a host whose weights are, in part, in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowtide.formats import MatrixFormat, StoredMatrix
from lowtide.formats.quantised import Quantised
from lowtide.formats.quantised_matrix import QuantisedMatrix
from lowtide.kernels.compiled import CompiledKernels
from lowtide.kernels.cpu.few_rows import FewRows
from lowtide.kernels.cpu.quantised import QuantisedOperators
from lowtide.kernels.cpu.weight_calls import MatrixCall
from lowtide.kernels.operands import Matrix
from lowtide.kernels.several_experts import SeveralExperts


class QuantisedKernels(CompiledKernels):
    """Few rows are multiplied with weights as they are stored, more with tiles of them; rows that
    are rounded all with weights as they are stored."""

    def __init__(self, few_rows: FewRows, operators: QuantisedOperators) -> None:
        super().__init__(few_rows, rounds_rows=operators.rounds_rows)
        self._operators = operators

    def matrix_call(self, matrix: Matrix) -> MatrixCall | None:
        if isinstance(matrix, QuantisedMatrix):
            return self._operators.matrix_call(matrix)
        return super().matrix_call(matrix)

    def unpack(self, matrix: StoredMatrix, out: Tensor) -> None:
        is_taken = out.dtype is torch.bfloat16 and out.is_cpu and out.is_contiguous()
        if isinstance(matrix, QuantisedMatrix) and is_taken:
            self._operators.unpack(matrix, out)
        else:
            super().unpack(matrix, out)

    def several_stored(self, formats: Sequence[MatrixFormat]) -> SeveralExperts | None:
        bits = {each.num_bits for each in formats if isinstance(each, Quantised)}
        if len(bits) != 1 or not all(isinstance(each, Quantised) for each in formats):
            return None
        return self._operators.experts(*bits)
