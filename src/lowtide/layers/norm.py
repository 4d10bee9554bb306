"""The RMS norm before and after the parts of a layer."""

from __future__ import annotations

from torch import Tensor

from lowtide.compute import Compute
from lowtide.kernels.layer_parts import NormParts
from lowtide.layers.rows import in_tiles
from lowtide.memory.workspace import TILE_ROWS


class Norm:
    """RMS norm with a weight [hidden].

    A weight in the compute dtype multiplies after rounding, one in float32 before it.
    """

    def __init__(self, weight: Tensor, eps: float, compute: Compute) -> None:
        self.weight = weight
        self.eps = eps
        self._compute = compute

    def parts(self) -> NormParts:
        return NormParts(self.weight, self.eps)

    def of(self, x: Tensor) -> Tensor:
        """Normalise x [rows, hidden] into a buffer that lives until the enclosing scope ends."""
        normed = self._compute.workspace.take("normed", tuple(x.shape), x.dtype)
        if x.shape[0] > TILE_ROWS:
            in_tiles(self._run, x, normed)
        else:
            compute = self._compute
            num_cores = compute.executor.num_cores
            compute.kernels.rms_norm(x, self.weight, self.eps, compute.workspace, normed, num_cores)
        return normed

    def write(self, x: Tensor, out: Tensor) -> None:
        """Normalise x to `out`, both [rows, hidden]."""
        in_tiles(self._run, x, out)

    def apply(self, x: Tensor) -> None:
        """Normalise x [rows, hidden] in place."""
        self.write(x, x)

    def _run(self, x: Tensor, out: Tensor) -> None:
        compute = self._compute
        num_cores = compute.executor.num_cores
        compute.kernels.rms_norm(x, self.weight, self.eps, compute.workspace, out, num_cores)
