"""Qwen3-MoE (Qwen3-30B-A3B and relatives).

Grouped-query attention with an RMS norm on each query and key head before the rotary embedding;
experts chosen by a softmax whose top-k weights are renormalised, without a shared expert.
"""

from __future__ import annotations

from lowtide.layers.router import SoftmaxRouter
from lowtide.layers.self_attention import GroupedAttention
from lowtide.models.decoder import Decoder


class Qwen3Moe(Decoder):
    """Names and numbers of Qwen3-MoE."""

    def attention(self, layer: int) -> GroupedAttention:
        return self.grouped_attention(layer, self.qk_norms(layer))  # [head_dim]: each head's own

    def router(self, layer: int) -> SoftmaxRouter:
        return self.softmax_router(layer, normalise=self.config.moe.norm_topk_prob)
