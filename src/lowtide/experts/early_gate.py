"""Early gate: the next layer's router, run on this layer's features, for prefetching."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.memory.workspace import Buffers
from lowtide.policies.prefetch import Gate

Route = Callable[[Tensor], Tensor]
"""Router of a layer: features [tokens, hidden] to expert ids [tokens, k] int64."""


@dataclass(frozen=True, slots=True)
class EarlyGate:
    """Predicts how many tokens the next MoE layer sends to each of its experts.

    DALI, Eqs. 10-11: the gate input changes little from one MoE layer to the next, by a mean that a
    calibration measures. HybriMoE assumes no change.
    """

    gate: Gate
    routes: Sequence[Route]  # of the MoE layers
    residual: Tensor | None  # [layers - 1, hidden]: what to add to a layer's features
    num_experts: int

    def predict(self, layer: int, x: Tensor, workspace: Buffers) -> Tensor | None:
        """Predict tokens per expert of `layer + 1`, [num_experts] int64.

        None without a gate or after the last layer. x [tokens, hidden]: the gate input of `layer`;
        unchanged.
        """
        if self.gate is Gate.NONE or layer + 1 >= len(self.routes):
            return None
        with workspace.scope():
            features = x
            if self.residual is not None:
                features = workspace.take("early features", tuple(x.shape), x.dtype)
                torch.add(x, self.residual[layer], out=features)
            experts = self.routes[layer + 1](features).reshape(-1)
            # `bincount` would look for the largest id first, on the host.
            counts = torch.zeros(self.num_experts, dtype=torch.int64, device=x.device)
            return counts.scatter_add_(0, experts, torch.ones_like(experts))
