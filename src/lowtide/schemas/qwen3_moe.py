"""Tensor names and shapes of Qwen3-MoE checkpoints."""

from __future__ import annotations

from lowtide.config import ModelConfig
from lowtide.schemas.parts import decoder, in_layers, router, separate_qkv, vector
from lowtide.schemas.schema import ModelSchema, TensorSpec


def schema(config: ModelConfig) -> ModelSchema:
    return decoder(config, _attention, router, absent=in_layers(config, "self_attn.q_proj.bias"))


def _attention(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    norms = [vector(f"{prefix}self_attn.{x}_norm.weight", config.head_dim) for x in "qk"]
    return [*separate_qkv(config, prefix), *norms]
