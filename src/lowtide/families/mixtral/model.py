"""Mixtral (8x7B and relatives).

Grouped-query attention without norms or biases; a few large experts, the best two of a softmax,
with renormalised weights kept in float32.
"""

from __future__ import annotations

from lowtide.layers.router import SoftmaxRouter
from lowtide.models.decoder import Decoder


class Mixtral(Decoder):
    """Tensor names and routing of Mixtral."""

    def router(self, layer: int) -> SoftmaxRouter:
        return SoftmaxRouter(
            self.compute,
            weight=self.tensor(f"model.layers.{layer}.block_sparse_moe.gate.weight"),
            num_experts_per_token=self.config.moe.num_experts_per_token,
            normalise=True,
        )
