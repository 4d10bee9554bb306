"""From hidden states to queries, keys and values."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lowtide.compute import Compute
from lowtide.config import ModelConfig
from lowtide.kernels.layer_parts import Product
from lowtide.kernels.operands import Matrix, rows_of
from lowtide.layers.linear import Linear


class Projection(Protocol):
    """Queries, keys and values of hidden states x [rows, hidden]."""

    @property
    def products(self) -> tuple[Product, ...]:
        """Whose outputs, side by side, are those of `forward`."""
        ...

    def forward(self, x: Tensor, out: Tensor) -> None:
        """All of them side by side: out [rows, query_size + 2 * kv_size]."""
        ...

    def queries(self, x: Tensor, out: Tensor) -> None:
        """out [rows, query_size]."""
        ...

    def keys_values(self, x: Tensor, out: Tensor) -> None:
        """Keys, then values: out [rows, 2 * kv_size]."""
        ...


class SeparateQKV:
    """Three products, each into its columns."""

    def __init__(self, query: Linear, key: Linear, value: Linear, config: ModelConfig) -> None:
        self._query = query
        self._key = key
        self._value = value
        spec = config.attention
        self._widths = [spec.query_size, 2 * spec.kv_size]

    @property
    def products(self) -> tuple[Product, ...]:
        return self._query.product, self._key.product, self._value.product

    def forward(self, x: Tensor, out: Tensor) -> None:
        query, both = torch.split(out, self._widths, dim=1)
        self.queries(x, query)
        self.keys_values(x, both)

    def queries(self, x: Tensor, out: Tensor) -> None:
        self._query.forward(x, out)

    def keys_values(self, x: Tensor, out: Tensor) -> None:
        key, value = out.chunk(2, dim=1)
        self._key.forward(x, key)
        self._value.forward(x, value)


class FusedQKV:
    """One product, of a weight [query_size + 2 * kv_size, hidden]; two of its parts where they are
    asked for one by one."""

    def __init__(
        self, weight: Matrix, bias: Tensor | None, config: ModelConfig, compute: Compute
    ) -> None:
        widths = [config.attention.query_size, 2 * config.attention.kv_size]
        biases = [None, None] if bias is None else torch.split(bias, widths)
        parts = (slice(widths[0]), slice(widths[0], None))
        weights = [rows_of(weight, part) for part in parts]
        self._all = Linear(weight, compute, bias)
        self._query, self._both = (
            Linear(weight, compute, bias) for weight, bias in zip(weights, biases, strict=True)
        )

    @property
    def products(self) -> tuple[Product, ...]:
        return (self._all.product,)

    def forward(self, x: Tensor, out: Tensor) -> None:
        self._all.forward(x, out)

    def queries(self, x: Tensor, out: Tensor) -> None:
        self._query.forward(x, out)

    def keys_values(self, x: Tensor, out: Tensor) -> None:
        self._both.forward(x, out)
