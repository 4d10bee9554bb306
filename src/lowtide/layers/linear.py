"""Matrix products with stored weights, and the gated MLP made of them."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from lowtide.core import align_up
from lowtide.kernels.products import REFERENCE, Products
from lowtide.kernels.reference import ExpertWeights, silu_times
from lowtide.memory.workspace import Buffers, tiles
from lowtide.threads.executor import Executor

SPLIT_BYTES = 4 << 20
"""Larger weights are always worth handing to another thread: reading them is the work."""

SPLIT_OPERATIONS = 1 << 24
"""Multiplications and additions from which smaller weights are, too (docs/log.md)."""


class Linear:
    """`out = x @ weight.T + bias`, its output features divided among the compute threads."""

    def __init__(
        self,
        weight: Tensor,
        executor: Executor,
        bias: Tensor | None = None,
        products: Products = REFERENCE,
    ) -> None:
        """weight: [out, in]. bias: [out]."""
        self._executor = executor
        self._multiply = products.multiply
        self._few_rows = products.few_rows
        self._bias = bias
        self._weight = weight
        self._whole = weight.t()
        self._pieces = _pieces(weight, executor.num_threads)

    def forward(self, x: Tensor, out: Tensor) -> None:
        """x [rows, in], out [rows, out]."""
        if self._few_rows is not None and self._few_rows.takes(x):
            self._few_rows.multiply(x, self._whole, self._bias, out, self._executor.num_cores)
            return
        if len(self._pieces) == 1 or not self._is_large(x.shape[0]):
            self._multiply(x, self._whole, self._bias, out)
            return
        bias = self._bias
        works = [
            partial(self._multiply, x, weight, None if bias is None else bias[rows], out[:, rows])
            for rows, weight in self._pieces
        ]
        self._executor.run(works)

    def _is_large(self, num_rows: int) -> bool:
        num_operations = 2 * num_rows * self._weight.numel()
        return self._weight.nbytes >= SPLIT_BYTES or num_operations >= SPLIT_OPERATIONS


class GatedMLP:
    """down(silu(gate x) * up x): a dense layer's MLP, or experts that every token uses."""

    def __init__(
        self, weights: ExpertWeights, executor: Executor, products: Products = REFERENCE
    ) -> None:
        self._width = weights.gate.shape[0]
        self._gate, self._up, self._down = (
            Linear(weight, executor, products=products) for weight in weights
        )

    def forward(self, x: Tensor, workspace: Buffers, out: Tensor) -> None:
        """x, out [rows, hidden]; `out` must not be `x`."""
        with workspace.scope():
            gate = workspace.take("mlp gate", (x.shape[0], self._width), x.dtype)
            up = workspace.take("mlp up", (x.shape[0], self._width), x.dtype)
            self._gate.forward(x, gate)
            self._up.forward(x, up)
            silu_times(gate, up)
            self._down.forward(gate, out)


def _pieces(weight: Tensor, num_pieces: int) -> list[tuple[slice, Tensor]]:
    """Ranges of output features, each with its transposed rows of `weight`.

    They begin at multiples of 64, and none is narrower than 16: a product's bits would depend on
    the number of pieces otherwise (measured, float32).
    """
    num_features = weight.shape[0]
    length = align_up(-(-num_features // num_pieces), 64)
    return [(features, weight[features].t()) for features in tiles(num_features, length)]
