"""OLMoE (1B-7B).

Queries and keys are normalised over all heads together, before they are divided into heads;
softmax routing whose top-k weights are not renormalised as published; no shared expert.
"""

from __future__ import annotations

from lowtide.kernels.operands import HeadNorms
from lowtide.layers.router import SoftmaxRouter
from lowtide.layers.self_attention import GroupedAttention
from lowtide.models.decoder import Decoder


class Olmoe(Decoder):
    """Names and numbers of OLMoE."""

    def attention(self, layer: int) -> GroupedAttention:
        prefix = f"model.layers.{layer}.self_attn."
        query, key = (self.tensor(f"{prefix}{part}_norm.weight") for part in "qk")
        # [query_size] and [kv_size]: all heads together.
        return self.grouped_attention(layer, HeadNorms(query, key))

    def router(self, layer: int) -> SoftmaxRouter:
        return SoftmaxRouter(
            self.compute,
            weight=self.tensor(f"model.layers.{layer}.mlp.gate.weight"),
            num_experts_per_token=self.config.moe.num_experts_per_token,
            normalise=self.config.moe.norm_topk_prob,
            rounds_weights=True,
        )
