"""A matrix in 8 or 4 bits in memory, as torch tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # code that has a matrix has imported torch
    import torch
    from torch import Tensor


GROUP = 64
"""Weights per scale and zero."""


class Groups(NamedTuple):
    """A matrix with rows of whole groups: weight = scale * code + zero, in float32."""

    codes: Tensor  # [out, groups, weights of a group], an integer type
    scales: Tensor  # [out, groups] float32
    zeros: Tensor  # [out, groups] float32


@dataclass(slots=True, eq=False)
class QuantisedMatrix:
    """[out, in] over the bytes of its rows; see `formats/quantised.py`."""

    data: Tensor  # [out, bytes of a row] uint8, a row's bytes adjacent
    num_bits: int
    num_columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.num_columns

    @property
    def nbytes(self) -> int:
        return math.prod(self.data.shape)

    @property
    def device(self) -> torch.device:
        return self.data.device

    def rows(self, features: slice | Tensor) -> QuantisedMatrix:
        """Select rows: a range as a view, or a copy of the numbered ones."""
        return QuantisedMatrix(self.data[features], self.num_bits, self.num_columns)

    def groups(self) -> Groups:
        """Split the matrix into codes, scales and zeros."""
        import torch

        num_rows, num_groups = self.data.shape[0], -(-self.num_columns // GROUP)
        code_bytes = num_groups * GROUP * self.num_bits // 8
        codes = self.data[:, :code_bytes].reshape(num_rows, num_groups, -1)
        if self.num_bits == 4:
            codes = torch.cat((codes & 15, codes >> 4), dim=2)
        ends = self.data[:, code_bytes:].contiguous().view(torch.float16).float()
        return Groups(codes, *ends.view(num_rows, 2, num_groups).unbind(1))

    def unpack(self, out: Tensor) -> None:
        """Write all weights into out [out, in], each rounded once from float32 to its type."""
        codes, scales, zeros = self.groups()
        weights = codes.float().mul_(scales[:, :, None]).add_(zeros[:, :, None])
        out.copy_(weights.view(len(codes), -1)[:, : self.num_columns])
