"""Tensor names and shapes of Qwen2-MoE (Qwen1.5-MoE) checkpoints."""

from __future__ import annotations

from lowtide.config import ModelConfig
from lowtide.schemas.parts import decoder, in_layers, mlp, router, separate_qkv
from lowtide.schemas.schema import ModelSchema, TensorSpec


def schema(config: ModelConfig) -> ModelSchema:
    biases = in_layers(config, "self_attn.q_proj.bias")
    return decoder(config, separate_qkv, _moe, absent=() if config.has_qkv_bias else biases)


def _moe(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    shared = mlp(prefix + "mlp.shared_expert.", config.shared_intermediate_size, config.hidden_size)
    gate = TensorSpec(prefix + "mlp.shared_expert_gate.weight", (1, config.hidden_size))
    return [*router(config, prefix), *shared, gate]
