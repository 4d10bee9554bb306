"""Tensor names and shapes of OLMoE checkpoints."""

from __future__ import annotations

from lowtide.config import ModelConfig
from lowtide.schemas.parts import decoder, router, separate_qkv, vector
from lowtide.schemas.schema import ModelSchema, TensorSpec


def schema(config: ModelConfig) -> ModelSchema:
    return decoder(config, _attention, router)


def _attention(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    # The norms are as wide as all heads together.
    norms = [
        vector(prefix + "self_attn.q_norm.weight", config.query_size),
        vector(prefix + "self_attn.k_norm.weight", config.kv_size),
    ]
    return [*separate_qkv(config, prefix), *norms]
