"""GLM-4.5 and later (GLM-4.5-Air, 4.6, 4.7).

Grouped-query attention with biases, in the largest ones an RMS norm on each query and key head, and
a rotary embedding of half of a head; dense first layers, then sigmoid-routed experts, chosen by
scores with a learned bias, and a shared expert.
"""

from __future__ import annotations

from lowtide.layers.router import SigmoidRouter
from lowtide.models.decoder import Decoder


class Glm4Moe(Decoder):
    """Tensor names and routing of GLM-4.5."""

    @staticmethod
    def is_float32(name: str) -> bool:
        return name.endswith((".mlp.gate.weight", ".e_score_correction_bias"))

    def router(self, layer: int) -> SigmoidRouter:
        gate = f"model.layers.{layer}.mlp.gate."
        weight, bias = (self.tensor(gate + x) for x in ("weight", "e_score_correction_bias"))
        return SigmoidRouter.of(self.compute, self.config.moe, weight, bias)
