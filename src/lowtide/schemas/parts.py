"""Tensors that families have in common, and how a family's parts become a schema."""

from __future__ import annotations

from collections.abc import Callable

from lowtide.config import ModelConfig
from lowtide.schemas.schema import ExpertStorage, ModelSchema, TensorSpec, expert_storages

Part = Callable[[ModelConfig, str], list[TensorSpec]]
"""Tensors of one part of a layer, whose names begin with the text given."""


def decoder(
    config: ModelConfig,
    attention: Part,
    moe: Part,
    *,
    embedding: str = "model.embed_tokens.weight",
    storages: tuple[ExpertStorage, ...] | None = None,
    absent: tuple[str, ...] = (),
) -> ModelSchema:
    """A pre-norm decoder with an embedding and a head at its ends.

    attention, moe: what the family has under `model.layers.N.`. storages: how its experts are
    stored, if not in `expert_storages`' own order. absent: see `ModelSchema`.
    """
    experts = config.experts
    dense = [TensorSpec(embedding, (config.vocab_size, config.hidden_size))]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        dense += attention(config, prefix)
        dense += [
            vector(prefix + "input_layernorm.weight", config.hidden_size),
            vector(prefix + "post_attention_layernorm.weight", config.hidden_size),
        ]
        if layer in config.moe_layers:
            dense += moe(config, prefix)
        else:
            dense += mlp(prefix + "mlp.", config.dense_size, config.hidden_size)
    dense.append(vector("model.norm.weight", config.hidden_size))
    if not config.tie_word_embeddings:
        dense.append(TensorSpec("lm_head.weight", (config.vocab_size, config.hidden_size)))
    return ModelSchema(
        dense=tuple(dense),
        storages=storages or storages_of(config),
        moe_layers=config.moe_layers,
        num_experts=experts.num_experts if experts else 0,
        one_expert_elements=experts.elements(config.hidden_size) if experts else 0,
        absent=absent,
    )


def storages_of(config: ModelConfig) -> tuple[ExpertStorage, ...]:
    """Every known way to store this model's experts; none where it has none."""
    if config.experts is None:
        return ()
    return expert_storages(config.moe.num_experts, config.moe.expert_size, config.hidden_size)


def vector(name: str, length: int) -> TensorSpec:
    return TensorSpec(name, (length,))


def mlp(prefix: str, width: int, hidden_size: int) -> list[TensorSpec]:
    """A gated MLP that every token uses."""
    return [
        TensorSpec(prefix + "gate_proj.weight", (width, hidden_size)),
        TensorSpec(prefix + "up_proj.weight", (width, hidden_size)),
        TensorSpec(prefix + "down_proj.weight", (hidden_size, width)),
    ]


def separate_qkv(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    """Grouped-query attention under `self_attn.` with a projection each, perhaps biased."""
    prefix += "self_attn."
    spec = config.attention
    widths = {"q": spec.query_size, "k": spec.kv_size, "v": spec.kv_size}
    specs = [
        TensorSpec(f"{prefix}{part}_proj.weight", (width, config.hidden_size))
        for part, width in widths.items()
    ]
    if spec.has_qkv_bias:
        specs += [vector(f"{prefix}{part}_proj.bias", width) for part, width in widths.items()]
    specs.append(TensorSpec(prefix + "o_proj.weight", (config.hidden_size, spec.query_size)))
    return specs


def router(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    """A linear router at `mlp.gate`."""
    return [TensorSpec(prefix + "mlp.gate.weight", (config.moe.num_experts, config.hidden_size))]


def in_layers(config: ModelConfig, *names: str) -> tuple[str, ...]:
    """These names in every layer."""
    return tuple(f"model.layers.{i}.{name}" for i in range(config.num_layers) for name in names)
