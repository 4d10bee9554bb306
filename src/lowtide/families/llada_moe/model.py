"""LLaDA-MoE (7B-A1B): the body of Qwen3-MoE, whose positions all see each other.

Attention with an RMS norm on each query and key head before the rotary embedding; experts chosen
by a softmax whose top-k weights are not renormalised, without a shared expert.
"""

from __future__ import annotations

from lowtide.kernels.operands import HeadNorms
from lowtide.layers.router import SoftmaxRouter
from lowtide.layers.self_attention import GroupedAttention
from lowtide.models.decoder import Decoder


class LLaDAMoE(Decoder):
    """Names and numbers of LLaDA-MoE."""

    def attention(self, layer: int) -> GroupedAttention:
        if not self.config.attention.has_qk_norm:
            return self.grouped_attention(layer)
        prefix = f"model.layers.{layer}.self_attn."
        query, key = (self.tensor(f"{prefix}{part}_norm.weight") for part in "qk")
        return self.grouped_attention(layer, HeadNorms(query, key))  # [head_dim]: each head's own

    def router(self, layer: int) -> SoftmaxRouter:
        return SoftmaxRouter(
            self.compute,
            weight=self.tensor(f"model.layers.{layer}.mlp.gate.weight"),
            num_experts_per_token=self.config.moe.num_experts_per_token,
            normalise=False,
            rounds_weights=True,
        )
