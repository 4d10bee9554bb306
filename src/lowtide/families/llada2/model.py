"""LLaDA2.0, 2.1 and 2.2 (block diffusion) and Ling 2.0 (autoregressive): one model.

Pre-norm decoder with fused QKV, per-head QK-norm before a partial rotary embedding, grouped-query
attention, a dense first layer, then sigmoid-routed experts with one shared expert. Only the
attention pattern differs, which the batch carries. Source: facts of the published modelling code.
"""

from __future__ import annotations

from lowtide.families.llada2.names import NAMES
from lowtide.kernels.operands import HeadNorms
from lowtide.layers.router import SigmoidRouter
from lowtide.layers.self_attention import GroupedAttention
from lowtide.models.decoder import Decoder


class LLaDA2(Decoder):
    """LLaDA2 or Ling 2.0; they have the same layers and names of tensors."""

    names = NAMES

    @staticmethod
    def is_float32(name: str) -> bool:
        return name.endswith((".mlp.gate.weight", ".mlp.gate.expert_bias"))

    def attention(self, layer: int) -> GroupedAttention:
        prefix = f"model.layers.{layer}.attention."
        norm = None
        if self.config.attention.has_qk_norm:
            norm = HeadNorms(
                self.tensor(prefix + "query_layernorm.weight"),
                self.tensor(prefix + "key_layernorm.weight"),
            )
        return GroupedAttention(
            layer,
            self.config,
            # All query heads, then all key heads, then all value heads.
            self.fused_qkv(layer, prefix + "query_key_value"),
            self.linear(prefix + "dense"),
            norm,
            self.kv_cache,
            self.compute,
        )

    def router(self, layer: int) -> SigmoidRouter:
        experts, prefix = self.config.moe, f"model.layers.{layer}.mlp.gate."
        bias = self.tensor(prefix + "expert_bias") if experts.has_bias else None
        return SigmoidRouter.of(self.compute, experts, self.tensor(prefix + "weight"), bias)
