"""Qwen3-MoE (Qwen3-30B-A3B and relatives).

Grouped-query attention with an RMS norm on each query and key head before the rotary embedding;
experts chosen by a softmax whose top-k weights are renormalised, without a shared expert.
"""

from __future__ import annotations

from lowtide.kernels.operands import HeadNorms
from lowtide.layers.router import SoftmaxRouter
from lowtide.layers.self_attention import GroupedAttention
from lowtide.models.decoder import Decoder


class Qwen3Moe(Decoder):
    """Names and numbers of Qwen3-MoE."""

    def attention(self, layer: int) -> GroupedAttention:
        prefix = f"model.layers.{layer}.self_attn."
        query, key = (self.tensor(f"{prefix}{part}_norm.weight") for part in "qk")
        return self.grouped_attention(layer, HeadNorms(query, key))  # [head_dim]: each head's own

    def router(self, layer: int) -> SoftmaxRouter:
        return SoftmaxRouter(
            self.compute,
            weight=self.tensor(f"model.layers.{layer}.mlp.gate.weight"),
            num_experts_per_token=self.config.moe.num_experts_per_token,
            normalise=self.config.moe.norm_topk_prob,
            rounds_weights=True,
        )
