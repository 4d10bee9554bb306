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
        experts, prefix = self.config.moe, f"model.layers.{layer}.mlp.gate."
        return SigmoidRouter(
            self.compute,
            weight=self.tensor(prefix + "weight"),
            bias=self.tensor(prefix + "e_score_correction_bias"),
            num_experts_per_token=experts.num_experts_per_token,
            num_groups=experts.num_groups,
            num_groups_per_token=experts.num_groups_per_token,
            capacity=0,
            window_tokens=0,
            normalise=experts.norm_topk_prob,
            scaling_factor=experts.scaling_factor,
        )
