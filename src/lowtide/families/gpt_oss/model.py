"""gpt-oss (20b and 120b).

Grouped-query attention with biased projections, a sink in each head's softmax and a sliding window
in some layers (every other one, as published); routing by a softmax over the chosen logits alone;
biased experts with a clamped gate (`kernels.reference.clamped_swiglu`). Norms multiply by their
weights in float32 before rounding.
"""

from __future__ import annotations

from lowtide.layers.router import TopSoftmaxRouter
from lowtide.layers.self_attention import GroupedAttention
from lowtide.models.decoder import Decoder


class GptOss(Decoder):
    """Tensor names and layers of gpt-oss."""

    @staticmethod
    def is_float32(name: str) -> bool:
        return name.endswith(("norm.weight", ".sinks"))

    def attention(self, layer: int) -> GroupedAttention:
        prefix = f"model.layers.{layer}.self_attn."
        return GroupedAttention(
            layer,
            self.config,
            self.separate_qkv(layer),
            self.linear(prefix + "o_proj"),
            None,
            self.kv_cache,
            self.compute,
            sinks=self.tensor(prefix + "sinks"),
        )

    def router(self, layer: int) -> TopSoftmaxRouter:
        prefix = f"model.layers.{layer}.mlp.router."
        return TopSoftmaxRouter(
            self.compute,
            weight=self.tensor(prefix + "weight"),
            bias=self.tensor(prefix + "bias"),
            num_experts_per_token=self.config.moe.num_experts_per_token,
        )
