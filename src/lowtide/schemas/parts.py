"""Tensors that families share, and the schema made from a family's parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lowtide.config import ModelConfig
from lowtide.schemas.names import PROJECTIONS, USUAL, Names
from lowtide.schemas.schema import (
    ExpertStorage,
    ModelSchema,
    TensorSpec,
    expert_storages,
    ungated_storages,
)

Part = Callable[[ModelConfig, str], list[TensorSpec]]
"""Function that lists the tensors of one part of a layer.

It is given the model's config with this layer alone, and the prefix of their names.
"""


def decoder(
    config: ModelConfig,
    attention: Part,
    moe: Part = lambda config, prefix: [],
    *,
    names: Names = USUAL,
    storages: tuple[ExpertStorage, ...] | None = None,
    absent: tuple[str, ...] = (),
) -> ModelSchema:
    """Make the schema of a pre-norm decoder with an embedding and a head.

    attention, moe: the family's tensors in a layer, moe without its routed experts.
    storages: of the routed experts, if not in the order of `expert_storages`.
    absent: see `ModelSchema`.
    """
    experts = config.experts
    alone = {kind: replace(config, layers=(kind,)) for kind in config.kinds}
    vocabulary = (config.vocab_size, config.hidden_size)
    dense = [TensorSpec(f"{names.embedding}.weight", vocabulary)]
    for layer, kind in enumerate(config.layers):
        prefix, norms = names.layer(layer), []
        if kind.mixer is not None:
            dense += attention(alone[kind], prefix)
            norms.append(names.attention_norm)
        if kind.mlp is not None:
            norms.append(names.mlp_norm)
        dense += [vector(f"{prefix}{norm}.weight", config.hidden_size) for norm in norms]
        if kind.experts is not None:
            dense += moe(alone[kind], prefix)
        if kind.dense is not None:
            own = mlp(prefix, kind.dense.size, config.hidden_size, names.mlp)
            dense += own[kind.dense.activation == "relu2" :]  # without a gate
    dense.append(vector(f"{names.norm}.weight", config.hidden_size))
    if not config.tie_word_embeddings:
        dense.append(TensorSpec(f"{names.head}.weight", vocabulary))
    return ModelSchema(
        dense=tuple(dense),
        storages=storages or storages_of(config),
        moe_layers=config.moe_layers,
        num_experts=experts.num_experts if experts else 0,
        one_expert_elements=experts.elements(config.hidden_size) if experts else 0,
        absent=absent,
        names=names,
    )


def storages_of(config: ModelConfig) -> tuple[ExpertStorage, ...]:
    """List every known way to store this model's experts; empty if it has none."""
    if config.experts is None:
        return ()
    moe = config.moe
    storages = expert_storages if moe.is_gated else ungated_storages
    return storages(moe.num_experts, moe.expert_size, config.hidden_size)


def vector(name: str, length: int) -> TensorSpec:
    return TensorSpec(name, (length,))


def mlp(
    prefix: str, width: int, hidden_size: int, names: tuple[str, str, str] = PROJECTIONS
) -> list[TensorSpec]:
    """List the tensors of a gated MLP; names: of its gate, up and down projections."""
    gate, up, down = names
    return [
        TensorSpec(f"{prefix}{gate}.weight", (width, hidden_size)),
        TensorSpec(f"{prefix}{up}.weight", (width, hidden_size)),
        TensorSpec(f"{prefix}{down}.weight", (hidden_size, width)),
    ]


def separate_qkv(config: ModelConfig, prefix: str, names: Names = USUAL) -> list[TensorSpec]:
    """List the tensors of grouped-query attention with separate projections, perhaps biased."""
    spec, hidden = config.attention, config.hidden_size
    widths = {names.query: spec.query_size, names.key: spec.kv_size, names.value: spec.kv_size}
    specs = [
        TensorSpec(f"{prefix}{name}.weight", (width, hidden)) for name, width in widths.items()
    ]
    if spec.has_qkv_bias:
        specs += [vector(f"{prefix}{name}.bias", width) for name, width in widths.items()]
    specs.append(TensorSpec(f"{prefix}{names.output}.weight", (hidden, spec.query_size)))
    return specs


def normed_qkv(config: ModelConfig, prefix: str, names: Names = USUAL) -> list[TensorSpec]:
    """List the tensors of `separate_qkv` and, if the model has them, query and key norms."""
    spec = config.attention
    norms = names.qk_norms if spec.has_qk_norm else ()
    vectors = [vector(f"{prefix}{name}.weight", spec.head_dim) for name in norms]
    return [*separate_qkv(config, prefix, names), *vectors]


def output_bias(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    """List the bias of attention's output, in a model whose projections all have one or none."""
    bias = vector(f"{prefix}self_attn.o_proj.bias", config.hidden_size)
    return [bias] if config.attention.has_qkv_bias else []


def normed_attention(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    """List the tensors of `normed_qkv` and of `output_bias`."""
    return [*normed_qkv(config, prefix), *output_bias(config, prefix)]


def router(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    """List the tensor of a linear router at `mlp.gate`."""
    shape = (config.moe.num_experts, config.hidden_size)
    return [TensorSpec(prefix + "mlp.gate.weight", shape, keeps_type=True)]


def in_layers(config: ModelConfig, *parts: str, names: Names = USUAL) -> tuple[str, ...]:
    """Repeat the names of these parts for every layer."""
    return tuple(names.layer(i) + part for i in range(config.num_layers) for part in parts)
