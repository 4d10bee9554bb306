"""Logits, or statistics of them, from the last hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.compute import Compute
from lowtide.errors import InternalError
from lowtide.kernels.operands import Matrix
from lowtide.kernels.row_statistics import Form, Guidance, Head, RowStatistics, Wanted
from lowtide.layers.linear import Linear
from lowtide.layers.rows import in_tiles


class LogitsHead:
    """The last norm and the product with the vocabulary."""

    def __init__(
        self,
        norm: Tensor,
        eps: float,
        vocabulary: Matrix,
        compute: Compute,
        factor: float = 1.0,
        cap: float = 0.0,
    ) -> None:
        """norm: [hidden]; vocabulary: [vocab, hidden]; factor, cap: see `Multipliers`."""
        self._factor, self._cap = factor, cap
        self._head = Head(norm, eps, vocabulary)
        self._product = Linear(vocabulary, compute)
        self._compute = compute

    def logits(self, hidden: Tensor, out: Tensor) -> None:
        """Compute logits: hidden [n, hidden], out [n, vocab] float32."""
        in_tiles(self._run, hidden, out)

    def divides(self, hidden: Tensor) -> bool:
        """Return True if `logits` of these rows [n, hidden] use a compiled product.

        See `Kernels.divides`.
        """
        return self._compute.kernels.divides(hidden, self._head.vocabulary)

    def statistics(
        self, hidden: Tensor, rows: Tensor, wanted: Wanted, guidance: Guidance | None, form: Form
    ) -> RowStatistics:
        """Compute `Kernels.row_statistics`; hidden [tokens, hidden]."""
        if self._factor != 1 or self._cap:
            raise InternalError("Statistics are those of logits without a factor or a cap.")
        kernels, workspace = self._compute.kernels, self._compute.workspace
        return kernels.row_statistics(
            hidden, rows, self._head, wanted, guidance, form, workspace, self._compute.executor.run
        )

    def _run(self, hidden: Tensor, out: Tensor) -> None:
        kernels, workspace = self._compute.kernels, self._compute.workspace
        with workspace.scope():
            normed = workspace.take("head input", tuple(hidden.shape), hidden.dtype)
            kernels.rms_norm(hidden, self._head.norm, self._head.eps, workspace, normed)
            if hidden.dtype == torch.float32:
                self._product.forward(normed, out)
            else:
                product = workspace.take("logits product", tuple(out.shape), hidden.dtype)
                self._product.forward(normed, product)
                out.copy_(product)
        if self._factor != 1:
            out.mul_(self._factor)
        if self._cap:
            out.div_(self._cap).tanh_().mul_(self._cap)
