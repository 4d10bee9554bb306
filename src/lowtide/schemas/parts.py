"""Tensors that families have in common, and how a family's parts become a schema."""

from __future__ import annotations

from collections.abc import Callable

from lowtide.config import ModelConfig
from lowtide.schemas.names import PROJECTIONS, USUAL, Names
from lowtide.schemas.schema import ExpertStorage, ModelSchema, TensorSpec, expert_storages

Part = Callable[[ModelConfig, str], list[TensorSpec]]
"""Tensors of one part of a layer, whose names begin with the text given."""


def decoder(
    config: ModelConfig,
    attention: Part,
    moe: Part = lambda config, prefix: [],
    *,
    names: Names = USUAL,
    storages: tuple[ExpertStorage, ...] | None = None,
    absent: tuple[str, ...] = (),
) -> ModelSchema:
    """A pre-norm decoder with an embedding and a head at its ends.

    attention, moe: what the family has in a layer, moe beside its routed experts. storages: how
    those are stored, if not in `expert_storages`' own order. absent: see `ModelSchema`.
    """
    experts = config.experts
    vocabulary = (config.vocab_size, config.hidden_size)
    dense = [TensorSpec(f"{names.embedding}.weight", vocabulary)]
    for layer in range(config.num_layers):
        prefix = names.layer(layer)
        dense += attention(config, prefix)
        dense += [
            vector(f"{prefix}{norm}.weight", config.hidden_size)
            for norm in (names.attention_norm, names.mlp_norm)
        ]
        if layer in config.moe_layers:
            dense += moe(config, prefix)
        else:
            dense += mlp(prefix, config.dense_size, config.hidden_size, names.mlp)
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
    """Every known way to store this model's experts; none where it has none."""
    if config.experts is None:
        return ()
    return expert_storages(config.moe.num_experts, config.moe.expert_size, config.hidden_size)


def vector(name: str, length: int) -> TensorSpec:
    return TensorSpec(name, (length,))


def mlp(
    prefix: str, width: int, hidden_size: int, names: tuple[str, str, str] = PROJECTIONS
) -> list[TensorSpec]:
    """A gated MLP that every token uses; names: of its gate, up and down projections."""
    gate, up, down = names
    return [
        TensorSpec(f"{prefix}{gate}.weight", (width, hidden_size)),
        TensorSpec(f"{prefix}{up}.weight", (width, hidden_size)),
        TensorSpec(f"{prefix}{down}.weight", (hidden_size, width)),
    ]


def separate_qkv(config: ModelConfig, prefix: str, names: Names = USUAL) -> list[TensorSpec]:
    """Grouped-query attention with a projection each, perhaps biased."""
    spec, hidden = config.attention, config.hidden_size
    widths = {names.query: spec.query_size, names.key: spec.kv_size, names.value: spec.kv_size}
    specs = [
        TensorSpec(f"{prefix}{name}.weight", (width, hidden)) for name, width in widths.items()
    ]
    if spec.has_qkv_bias:
        specs += [vector(f"{prefix}{name}.bias", width) for name, width in widths.items()]
    specs.append(TensorSpec(f"{prefix}{names.output}.weight", (hidden, spec.query_size)))
    return specs


def normed_qkv(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    """The same with a norm on each query and key head, in models that have one."""
    which, head_dim = "qk" if config.attention.has_qk_norm else "", config.attention.head_dim
    norms = [vector(f"{prefix}self_attn.{x}_norm.weight", head_dim) for x in which]
    return [*separate_qkv(config, prefix), *norms]


def router(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    """A linear router at `mlp.gate`."""
    shape = (config.moe.num_experts, config.hidden_size)
    return [TensorSpec(prefix + "mlp.gate.weight", shape, keeps_type=True)]


def in_layers(config: ModelConfig, *parts: str, names: Names = USUAL) -> tuple[str, ...]:
    """The names of these parts in every layer."""
    return tuple(names.layer(i) + part for i in range(config.num_layers) for part in parts)
