"""Matrix products with stored weights, and the gated MLP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import groupby

from torch import Tensor

from lowtide.compute import Compute
from lowtide.core import align_up
from lowtide.kernels.layer_parts import MLPParts, Product
from lowtide.kernels.operands import Matrix, rows_of
from lowtide.layers.rows import num_rows_of, tiles_of
from lowtide.memory.workspace import TILE_ROWS, tiles

SPLIT_BYTES = 4 << 20
"""Weights above this size are always divided among threads: reading them is the work."""

SPLIT_OPERATIONS = 1 << 24
"""Multiplications and additions above which smaller weights are divided, too (docs/log)."""

PRODUCT_ROWS = 256
"""Rows per product (and up to 15 more). Fixed, because it decides bits.

Products of up to 256 rows had the same bits however features were divided, also with AMX (257 to
271 were not measured), and 256 was the fastest size tried for most shapes (docs/log).
"""


class Linear:
    """`out = x @ weight.T + bias`, with output features divided among the compute threads."""

    def __init__(self, weight: Matrix, compute: Compute, bias: Tensor | None = None) -> None:
        """weight: [out, in]; bias: [out]."""
        self._compute = compute
        self._bias = bias
        self._weight = weight
        self._pieces = _pieces(weight, compute.executor.num_threads)
        self._tile_rows = TILE_ROWS
        self._whole: Tensor | None = None
        if isinstance(weight, Tensor):
            self._tile_rows = PRODUCT_ROWS
            if len(self._pieces) == 1:  # never divided: a tile is one call
                self._whole = weight.t()

    @property
    def product(self) -> Product:
        return Product(self._weight, self._bias)

    def forward(self, x: Tensor, out: Tensor) -> None:
        """Compute out [rows, out] from x [rows, in]; unpacked weights use larger tiles.

        Tiles of equal length are queued together. A product is divided by its tile alone, because
        beyond `PRODUCT_ROWS` rows the division of features decides bits.
        """
        if self._whole is not None and x.shape[0] <= self._tile_rows:
            num_cores = self._compute.executor.num_cores
            self._compute.kernels.multiply(x, self._whole, self._bias, out, num_cores)
            return
        for _, parts in groupby(tiles_of(x, self._tile_rows), num_rows_of):
            self._run(list(parts), x, out)

    def _run(self, parts: Sequence[slice], x: Tensor, out: Tensor) -> None:
        kernels, executor = self._compute.kernels, self._compute.executor
        is_whole = len(self._pieces) == 1 or not self._is_large(num_rows_of(parts[0]))
        if is_whole or kernels.divides(x[parts[0]], self._weight):
            self._multiply(parts, x, self._weight, out, self._bias, executor.num_cores)
            return
        works = [
            partial(
                self._multiply,
                parts,
                x,
                weight,
                out[:, features],
                None if self._bias is None else self._bias[features],
            )
            for features, weight in self._pieces
        ]
        executor.run(works)

    def _multiply(
        self,
        parts: Sequence[slice],
        x: Tensor,
        weight: Matrix,
        out: Tensor,
        bias: Tensor | None,
        num_threads: int = 1,
    ) -> None:
        for part in parts:
            self._compute.kernels.multiply_by(x[part], weight, out[part], bias, num_threads)

    def _is_large(self, num_rows: int) -> bool:
        num_operations = 2 * num_rows * math.prod(self._weight.shape)
        return self._weight.nbytes >= SPLIT_BYTES or num_operations >= SPLIT_OPERATIONS


class GatedMLP:
    """Gated MLP, down(f(gate x) * up x), of a dense layer or a shared expert."""

    def __init__(
        self, gate: Matrix, up: Matrix, down: Matrix, compute: Compute, activation: str = "silu"
    ) -> None:
        """gate, up: [width, hidden]; down: [hidden, width]; activation: silu or gelu_tanh."""
        self._width = gate.shape[0]
        self._gate, self._up, self._down = (Linear(each, compute) for each in (gate, up, down))
        self._has_gelu = activation == "gelu_tanh"
        self._compute = compute

    def parts(self, share: Tensor | None = None) -> MLPParts:
        """Return the matrices for kernels that run whole layers."""
        gate, up, down = (each.product.weight for each in (self._gate, self._up, self._down))
        return MLPParts(gate, up, down, share)

    def forward(self, x: Tensor, out: Tensor) -> None:
        """Compute out [rows, hidden] from x [rows, hidden]; `out` may be `x`.

        Intermediate results of all rows exist together: callers with many rows divide them
        (`in_chunks`).
        """
        workspace = self._compute.workspace
        with workspace.scope():
            gate = workspace.take("mlp gate", (x.shape[0], self._width), x.dtype)
            up = workspace.take("mlp up", (x.shape[0], self._width), x.dtype)
            self._gate.forward(x, gate)
            self._up.forward(x, up)
            if self._has_gelu:
                self._compute.kernels.gelu_times(gate, up)
            else:
                self._compute.kernels.silu_times(gate, up, self._compute.executor.num_cores)
            self._down.forward(gate, out)


class SquaredMLP:
    """MLP without a gate, down(relu(up x) ** 2)."""

    def __init__(self, up: Matrix, down: Matrix, compute: Compute) -> None:
        """up: [width, hidden]; down: [hidden, width]."""
        self._width = up.shape[0]
        self._up, self._down = (Linear(each, compute) for each in (up, down))
        self._workspace = compute.workspace

    def forward(self, x: Tensor, out: Tensor) -> None:
        """Compute out [rows, hidden] from x [rows, hidden], as `GatedMLP.forward` does."""
        with self._workspace.scope():
            up = self._workspace.take("mlp up", (x.shape[0], self._width), x.dtype)
            self._up.forward(x, up)
            self._down.forward(up.relu_().square_(), out)


MLP = GatedMLP | SquaredMLP


def _pieces(weight: Matrix, num_pieces: int) -> list[tuple[slice, Matrix]]:
    """Divide output features into ranges, each with its rows of `weight`.

    Ranges begin at multiples of 64, and none is narrower than 16; otherwise a product's bits would
    depend on the number of ranges (measured, float32).
    """
    num_features = weight.shape[0]
    length = align_up(-(-num_features // num_pieces), 64)
    return [(features, rows_of(weight, features)) for features in tiles(num_features, length)]
