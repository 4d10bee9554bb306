"""Qwen2-MoE (Qwen1.5-MoE-A2.7B and relatives).

Grouped-query attention with biased query, key and value projections; softmax routing whose top-k
weights are not renormalised as published, and a shared expert weighted by a sigmoid gate.
"""

from __future__ import annotations

from torch import Tensor

from lowtide.layers.linear import GatedMLP
from lowtide.models.decoder import Decoder


class Qwen2Moe(Decoder):
    """Tensor names and layers of Qwen2-MoE."""

    def shared_expert(self, layer: int) -> tuple[GatedMLP | None, Tensor | None]:
        prefix = f"model.layers.{layer}.mlp."
        gate = self.tensor(prefix + "shared_expert_gate.weight")
        return self.mlp(prefix + "shared_expert."), gate
