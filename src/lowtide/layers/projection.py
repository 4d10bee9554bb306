"""Projection of hidden states to queries, keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.compute import Compute
from lowtide.config import AttentionSpec
from lowtide.kernels.layer_parts import Product
from lowtide.kernels.operands import Matrix, rows_of
from lowtide.layers.linear import Linear


class SideBySide:
    """Products of the same inputs, each into its own columns."""

    def __init__(self, *linears: Linear) -> None:
        self._linears = linears
        self._widths = [linear.product.weight.shape[0] for linear in linears]

    @property
    def products(self) -> tuple[Product, ...]:
        return tuple(linear.product for linear in self._linears)

    def forward(self, x: Tensor, out: Tensor) -> None:
        """Compute x [rows, in] into out [rows, the sum of all widths]."""
        for linear, columns in zip(
            self._linears, torch.split(out, self._widths, dim=1), strict=True
        ):
            linear.forward(x, columns)


class Projection(NamedTuple):
    """Projections of hidden states [rows, hidden] to the elements of all heads."""

    whole: SideBySide  # queries, then keys, then values
    queries: SideBySide
    keys_values: SideBySide

    @classmethod
    def separate(cls, query: Linear, key: Linear, value: Linear) -> Projection:
        """Make a projection of three products."""
        return cls(SideBySide(query, key, value), SideBySide(query), SideBySide(key, value))

    @classmethod
    def fused(
        cls, weight: Matrix, bias: Tensor | None, spec: AttentionSpec, compute: Compute
    ) -> Projection:
        """Make one product of a weight [query_size + 2 * kv_size, hidden].

        Long passes use two parts of it: queries, and keys with values.
        """
        widths = [spec.query_size, 2 * spec.kv_size]
        biases: Sequence[Tensor | None] = (None, None)
        if bias is not None:
            biases = torch.split(bias, widths)
        parts = (slice(widths[0]), slice(widths[0], None))
        queries, keys_values = (
            SideBySide(Linear(rows_of(weight, part), compute, own))
            for part, own in zip(parts, biases, strict=True)
        )
        return cls(SideBySide(Linear(weight, compute, bias)), queries, keys_values)
