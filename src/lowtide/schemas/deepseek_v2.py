"""Tensor names and shapes of DeepSeek-V2 and V2-Lite checkpoints."""

from __future__ import annotations

from lowtide.config import ModelConfig
from lowtide.schemas.parts import decoder, mlp, router, vector
from lowtide.schemas.schema import ModelSchema, TensorSpec


def schema(config: ModelConfig) -> ModelSchema:
    return decoder(config, _attention, _moe)


def _attention(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    prefix += "self_attn."
    hidden, rank, heads = config.hidden_size, config.kv_lora_rank, config.num_heads
    fixed_dim = config.head_dim - config.rotary_dim
    return [
        *_queries(config, prefix),
        # One latent for all heads, and one rotating key beside it.
        TensorSpec(prefix + "kv_a_proj_with_mqa.weight", (rank + config.rotary_dim, hidden)),
        vector(prefix + "kv_a_layernorm.weight", rank),
        # Rows of a head: its keys' part without rotation, then its values.
        TensorSpec(
            prefix + "kv_b_proj.weight", (heads * (fixed_dim + config.value_head_dim), rank)
        ),
        TensorSpec(prefix + "o_proj.weight", (hidden, heads * config.value_head_dim)),
    ]


def _queries(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    if not config.q_lora_rank:
        return [TensorSpec(prefix + "q_proj.weight", (config.query_size, config.hidden_size))]
    return [
        TensorSpec(prefix + "q_a_proj.weight", (config.q_lora_rank, config.hidden_size)),
        vector(prefix + "q_a_layernorm.weight", config.q_lora_rank),
        TensorSpec(prefix + "q_b_proj.weight", (config.query_size, config.q_lora_rank)),
    ]


def _moe(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    if not config.shared_intermediate_size:
        return router(config, prefix)
    shared = mlp(
        prefix + "mlp.shared_experts.", config.shared_intermediate_size, config.hidden_size
    )
    return [*router(config, prefix), *shared]
