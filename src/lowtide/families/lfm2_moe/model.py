"""LFM2 and LFM2.5 with experts (8B-A1B, 24B-A2B).

LFM2's short convolutions and attention; dense first layers, then sigmoid-routed experts, chosen by
scores with a learned bias.
"""

from __future__ import annotations

from lowtide.families.lfm2.model import Lfm2
from lowtide.layers.router import SigmoidRouter

_SUM_EPSILON = 1e-6  # of the published code


class Lfm2Moe(Lfm2):
    """LFM2 with experts; router weights and scores are in the compute dtype."""

    @staticmethod
    def is_float32(name: str) -> bool:
        return name.endswith(".expert_bias")

    def router(self, layer: int) -> SigmoidRouter:
        prefix, moe = f"{self.names.layer(layer)}feed_forward.", self.config.moe
        weight = self.tensor(f"{prefix}gate.weight")
        bias = self.tensor(f"{prefix}expert_bias") if moe.has_bias else None
        return SigmoidRouter.of(self.compute, moe, weight, bias, _SUM_EPSILON)
