"""LLaDA-MoE (7B-A1B): the body of Qwen3-MoE, whose positions all see each other.

Attention with an RMS norm on each query and key head before the rotary embedding; experts chosen
by a softmax whose top-k weights are not renormalised, without a shared expert.
"""

from __future__ import annotations

from lowtide.layers.router import SoftmaxRouter
from lowtide.layers.self_attention import GroupedAttention
from lowtide.models.decoder import Decoder


class LLaDAMoE(Decoder):
    """Names and numbers of LLaDA-MoE."""

    def attention(self, layer: int) -> GroupedAttention:
        if not self.config.attention.has_qk_norm:
            return self.grouped_attention(layer)
        return self.grouped_attention(layer, self.qk_norms(layer))  # [head_dim]: each head's own

    def router(self, layer: int) -> SoftmaxRouter:
        return self.softmax_router(layer, normalise=False)
