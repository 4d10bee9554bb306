"""Mixtral (8x7B and relatives).

Grouped-query attention without norms or biases; few, large experts, the best two of a softmax,
their weights renormalised and kept in float32.
"""

from __future__ import annotations

from lowtide.layers.router import SoftmaxRouter
from lowtide.models.decoder import Decoder


class Mixtral(Decoder):
    """Names and numbers of Mixtral."""

    def router(self, layer: int) -> SoftmaxRouter:
        return SoftmaxRouter(
            self.compute,
            weight=self.tensor(f"model.layers.{layer}.block_sparse_moe.gate.weight"),
            num_experts_per_token=self.config.moe.num_experts_per_token,
            normalise=True,
        )
