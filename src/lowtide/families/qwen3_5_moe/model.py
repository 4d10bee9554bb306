"""Qwen3.5, Qwen3.6 and Qwen3-Next, with experts or without.

Most layers have a gated delta-net, every fourth grouped-query attention with an RMS norm on each
query and key head, a rotary embedding of a quarter of a head and a gate on its output; in most
models softmax routing whose top-k weights are renormalised, and a shared expert weighted by a
sigmoid gate. Norms multiply by 1 + w in float32, but for the one after a delta-net.
"""

from __future__ import annotations

from torch import Tensor

from lowtide.config import DeltaNetSpec
from lowtide.families.qwen_hybrid import is_centred
from lowtide.kernels.operands import DeltaWeights, HeadNorms
from lowtide.layers.delta_net import DeltaNet, DeltaProjections
from lowtide.layers.gated_attention import GatedAttention
from lowtide.layers.linear import GatedMLP, Linear
from lowtide.layers.projection import SideBySide
from lowtide.models.decoder import Attention, Decoder


class QwenHybrid(Decoder):
    """Tensor names and layers of Qwen3.5 and Qwen3-Next."""

    @staticmethod
    def is_float32(name: str) -> bool:
        return is_centred(name) or name.endswith((".conv1d.weight", ".A_log", ".dt_bias"))

    @staticmethod
    def adjust(name: str, weight: Tensor) -> None:
        if name.endswith(".A_log"):
            weight.exp_().neg_()
        elif is_centred(name):
            weight.add_(1.0)

    def attention(self, layer: int) -> Attention:
        if isinstance(self.config.layers[layer].mixer, DeltaNetSpec):
            return self._delta_net(layer)
        prefix = f"model.layers.{layer}.self_attn."
        return GatedAttention(
            layer,
            self.config,
            self.linear(prefix + "q_proj"),
            SideBySide(*(self.linear(f"{prefix}{x}_proj") for x in "kv")),
            self.linear(prefix + "o_proj"),
            HeadNorms(*(self.tensor(f"{prefix}{x}_norm.weight") for x in "qk")),
            self.kv_cache,
            self.compute,
        )

    def shared_expert(self, layer: int) -> tuple[GatedMLP | None, Tensor | None]:
        prefix = f"model.layers.{layer}.mlp."
        gate = self.tensor(prefix + "shared_expert_gate.weight")
        return self.mlp(prefix + "shared_expert."), gate

    def _delta_net(self, layer: int) -> DeltaNet:
        prefix = f"model.layers.{layer}.linear_attn."
        spec = self.config.mixer(DeltaNetSpec, layer)
        weights = (self.tensor(prefix + x) for x in ("conv1d.weight", "A_log", "dt_bias"))
        return DeltaNet(
            layer,
            self.config,
            self._projections(spec, prefix + "in_proj_"),
            DeltaWeights(spec, *weights),
            self.tensor(prefix + "norm.weight"),
            self.linear(prefix + "out_proj"),
            self.kv_cache,
            self.compute,
        )

    def _projections(self, spec: DeltaNetSpec, prefix: str) -> DeltaProjections:
        """Make the projections, of which Qwen3-Next's do several things at once."""

        def linear(name: str, fused: str) -> tuple[Linear, bool]:
            is_fused = f"{prefix}{fused}.weight" in self.weights
            return self.linear(prefix + (fused if is_fused else name)), is_fused

        mixed, has_gates = linear("qkv", "qkvz")
        beta, has_time = linear("b", "ba")
        gates = None if has_gates else self.linear(prefix + "z")
        time = None if has_time else self.linear(prefix + "a")
        return DeltaProjections(spec, self.compute, mixed, gates, beta, time)
