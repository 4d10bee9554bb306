"""LLaDA2.0, 2.1 and 2.2 (block diffusion) and Ling 2.0 (autoregressive): one body.

Pre-norm decoder with fused QKV, per-head QK-norm before a partial rotary embedding, grouped-query
attention, a dense first layer and sigmoid-routed experts with one shared expert after it. Only the
attention pattern differs, and that is in the batch. Source: facts of the published modelling code.
"""

from __future__ import annotations

from torch import Tensor

from lowtide.layers.linear import GatedMLP
from lowtide.layers.router import SigmoidRouter
from lowtide.layers.self_attention import GroupedAttention, QKNorm
from lowtide.models.decoder import Decoder


class LLaDA2(Decoder):
    """Names and numbers of the Ling 2.0 body."""

    embedding_name = "model.word_embeddings.weight"

    @staticmethod
    def is_float32(name: str) -> bool:
        return name.endswith((".mlp.gate.weight", ".mlp.gate.expert_bias"))

    def attention(self, layer: int) -> GroupedAttention:
        prefix = f"model.layers.{layer}.attention."
        norm = None
        if self.config.has_qk_norm:
            norm = QKNorm(
                self.weights[prefix + "query_layernorm.weight"],
                self.weights[prefix + "key_layernorm.weight"],
            )
        return GroupedAttention(
            layer,
            self.config,
            # All query heads, then all key heads, then all value heads.
            self.linear(prefix + "query_key_value"),
            self.linear(prefix + "dense"),
            norm,
            self.kv_cache,
            self.executor,
            self.products,
        )

    def router(self, layer: int) -> SigmoidRouter:
        config, prefix = self.config, f"model.layers.{layer}.mlp.gate."
        return SigmoidRouter(
            weight=self.weights[prefix + "weight"],
            bias=self.weights[prefix + "expert_bias"] if config.has_expert_bias else None,
            num_experts_per_token=config.num_experts_per_token,
            num_groups=config.num_expert_groups,
            num_groups_per_token=config.num_groups_per_token,
            capacity=config.expert_capacity,
            window_tokens=config.routing_block_size,
            normalise=config.norm_topk_prob,
            scaling_factor=config.routed_scaling_factor,
        )

    def shared_expert(self, layer: int) -> tuple[GatedMLP | None, Tensor | None]:
        if not self.config.shared_intermediate_size:
            return None, None
        return self.mlp(f"model.layers.{layer}.mlp.shared_experts."), None
