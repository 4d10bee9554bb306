"""OLMoE (1B-7B).

Queries and keys are normalised over all heads together, before they are divided into heads;
softmax routing whose top-k weights are not renormalised as published; no shared expert.
"""

from __future__ import annotations

from lowtide.layers.router import SoftmaxRouter
from lowtide.layers.self_attention import GroupedAttention
from lowtide.models.decoder import Decoder


class Olmoe(Decoder):
    """Names and numbers of OLMoE."""

    def attention(self, layer: int) -> GroupedAttention:
        # [query_size] and [kv_size]: all heads together.
        return self.grouped_attention(layer, self.qk_norms(layer))

    def router(self, layer: int) -> SoftmaxRouter:
        return self.softmax_router(layer, normalise=self.config.moe.norm_topk_prob)
