"""DeepSeek-V3 and its relatives: DeepSeek-V2's latent attention, and experts routed by sigmoids."""

from __future__ import annotations

from lowtide.families.deepseek_v2.model import DeepseekV2
from lowtide.layers.router import Router, SigmoidRouter


class DeepseekV3(DeepseekV2):
    """Routing of DeepSeek-V3."""

    @staticmethod
    def is_float32(name: str) -> bool:
        return name.endswith((".mlp.gate.weight", ".e_score_correction_bias"))

    def router(self, layer: int) -> Router:
        gate = f"model.layers.{layer}.mlp.gate."
        weight, bias = (self.tensor(gate + x) for x in ("weight", "e_score_correction_bias"))
        return SigmoidRouter.of(self.compute, self.config.moe, weight, bias)
