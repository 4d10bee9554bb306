"""The next layer's router, run on this layer's features: what a prefetch goes by."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lowtide.memory.workspace import Buffers
from lowtide.policies.prefetch import Gate

Route = Callable[[Tensor], Tensor]
"""A layer's router: features [tokens, hidden] to expert ids [tokens, k] int64."""


class EarlyGate:
    """Predicts how many tokens the next MoE layer will send to each of its experts.

    DALI, Eqs. 10-11: the gate input moves little from one MoE layer to the next, by a mean that a
    calibration knows. HybriMoE takes it as it is.
    """

    def __init__(
        self, gate: Gate, routes: Sequence[Route], residual: Tensor | None, num_experts: int
    ) -> None:
        """`routes`: per MoE layer. `residual` [layers - 1, hidden] in the compute dtype: what to
        add to a layer's features; None with Gate.RAW."""
        self._gate = gate
        self._routes = routes
        self._residual = residual
        self._num_experts = num_experts

    def predict(self, layer: int, x: Tensor, workspace: Buffers) -> Tensor | None:
        """Tokens per expert of `layer + 1`, [num_experts] int64; None where nothing is asked.

        x [tokens, hidden]: the gate input of `layer`, not changed.
        """
        if self._gate is Gate.NONE or layer + 1 >= len(self._routes):
            return None
        with workspace.scope():
            features = x
            if self._residual is not None:
                features = workspace.take("early features", tuple(x.shape), x.dtype)
                torch.add(x, self._residual[layer], out=features)
            experts = self._routes[layer + 1](features).reshape(-1)
            # `bincount` would look for the largest id first, on the host.
            counts = torch.zeros(self._num_experts, dtype=torch.int64, device=x.device)
            return counts.scatter_add_(0, experts, torch.ones_like(experts))
