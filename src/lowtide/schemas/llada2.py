"""Tensor names and shapes of the Ling 2.0 body: LLaDA2.x and BailingMoeV2 checkpoints.

Multi-token-prediction layers, which some exports carry after the last layer, are not needed.
"""

from __future__ import annotations

from lowtide.config import ModelConfig
from lowtide.schemas.parts import decoder, mlp, router, vector
from lowtide.schemas.schema import ModelSchema, TensorSpec


def schema(config: ModelConfig) -> ModelSchema:
    return decoder(
        config,
        _attention,
        _moe,
        embedding="model.word_embeddings.weight",
        absent=tuple(_absent(config)),
    )


def _attention(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    prefix += "attention."
    # Rows of the fused projection: all query heads, then all keys, then all values.
    fused = config.query_size + 2 * config.kv_size
    specs = [
        TensorSpec(prefix + "query_key_value.weight", (fused, config.hidden_size)),
        TensorSpec(prefix + "dense.weight", (config.hidden_size, config.query_size)),
    ]
    if config.has_qk_norm:
        for name in ("query_layernorm", "key_layernorm"):
            specs.append(vector(f"{prefix}{name}.weight", config.head_dim))
    return specs


def _moe(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    specs = router(config, prefix)
    if config.has_expert_bias:
        # BF16 in LLaDA2.0, F32 in 2.1 and 2.2.
        specs.append(vector(prefix + "mlp.gate.expert_bias", config.num_experts))
    if config.shared_intermediate_size:
        width = config.shared_intermediate_size
        specs += mlp(prefix + "mlp.shared_experts.", width, config.hidden_size)
    return specs


def _absent(config: ModelConfig) -> list[str]:
    names = []
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        names += [prefix + "attention.query_key_value.bias", prefix + "attention.dense.bias"]
        if not config.has_qk_norm:
            names.append(prefix + "attention.query_layernorm.weight")
        if layer in config.moe_layers:
            if not config.has_expert_bias:
                names.append(prefix + "mlp.gate.expert_bias")
            if not config.shared_intermediate_size:
                names.append(prefix + "mlp.shared_experts.gate_proj.weight")
    return names
