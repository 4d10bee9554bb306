"""MiniMax-M2, M2.1 and M2.5.

Grouped-query attention whose queries and keys are normalised over all heads together; half of each
head rotates. Sigmoid-routed experts, chosen by scores with a learned bias, in all layers.
"""

from __future__ import annotations

from lowtide.layers.router import SigmoidRouter
from lowtide.models.decoder import Decoder


class MiniMaxM2(Decoder):
    """Tensor names and routing of MiniMax-M2."""

    @staticmethod
    def is_float32(name: str) -> bool:
        return name.endswith((".block_sparse_moe.gate.weight", ".e_score_correction_bias"))

    def router(self, layer: int) -> SigmoidRouter:
        moe = f"model.layers.{layer}.block_sparse_moe."
        weight, bias = (self.tensor(moe + x) for x in ("gate.weight", "e_score_correction_bias"))
        return SigmoidRouter.of(self.compute, self.config.moe, weight, bias)
