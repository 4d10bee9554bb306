"""Tensor names and shapes of Mixtral checkpoints."""

from __future__ import annotations

from lowtide.config import ModelConfig
from lowtide.schemas.parts import decoder, layouts_of, separate_qkv
from lowtide.schemas.schema import ModelSchema, TensorSpec


def schema(config: ModelConfig) -> ModelSchema:
    per_expert, published, *others = layouts_of(config)
    return decoder(config, separate_qkv, _moe, layouts=(published, per_expert, *others))


def _moe(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    # Files in transformers' own layout call the layer `mlp`.
    shape = (config.num_experts, config.hidden_size)
    name, other_name = (f"{prefix}{x}.gate.weight" for x in ("block_sparse_moe", "mlp"))
    return [TensorSpec(name, shape, other_name=other_name)]
