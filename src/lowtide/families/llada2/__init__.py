"""LLaDA2.0, 2.1 and 2.2: `config.json`, tensors, sizes.

The layers are those of Ling 2.0 (`families/bailing_moe_v2`), which is autoregressive. Layers for
multi-token prediction, which some exports have after the last layer, are not needed.
"""

from __future__ import annotations

from lowtide.config import Blocks, ExpertSpec, ModelConfig, Published, keys
from lowtide.config.fields import MAX_EXPERTS, MAX_LAYERS, MAX_POSITIONS, Fields
from lowtide.config.keys import Origin
from lowtide.families.family import Family
from lowtide.families.llada2.names import NAMES
from lowtide.schemas.parts import decoder, mlp, router, vector
from lowtide.schemas.schema import ModelSchema, TensorSpec


def read(fields: Fields, origin: Origin, can_stretch: bool = False) -> ModelConfig:
    """Read the config; can_stretch: see `read_rope`."""
    fields.only("score_function", "sigmoid")
    fields.only("use_rmsnorm", True)
    for name in (
        "use_bias",
        "use_qkv_bias",
        "attention_bias",
        "norm_head",
        "norm_softmax",
        "use_sliding_window",
        "using_split_qkv_in_self_attention",
    ):
        fields.only(name, False)
    block_size = fields.integer("block_size", low=1, high=MAX_POSITIONS, default=32)
    experts = _read_experts(fields, block_size)
    # Absent from the published LLaDA2.0 and 2.1 configs, whose checkpoints have the tensors.
    has_qk_norm = fields.boolean("use_qk_norm", default=True)
    return keys.decoder(
        fields,
        origin,
        keys.grouped_attention(
            fields, can_stretch=can_stretch, usual_factor=1.0, has_qk_norm=has_qk_norm
        ),
        experts,
        dense_size=keys.width(fields, "intermediate_size"),
        block_length=fields.integer("block_length", low=1, high=MAX_POSITIONS, default=block_size),
    )


def _read_experts(fields: Fields, block_size: int) -> ExpertSpec:
    each, count = keys.expert_size(fields), keys.num_experts(fields)
    num_shared = fields.integer("num_shared_experts", low=0, high=64, default=0)
    shared_size = keys.width(fields, "moe_shared_expert_intermediate_size", default=each)
    capacity = fields.integer("expert_capacity", low=0, high=MAX_EXPERTS, default=0)
    num_groups, num_groups_per_token = _read_groups(fields, count, capacity)
    return keys.experts(
        fields,
        each,
        norm_topk_prob=fields.boolean("norm_topk_prob", default=True),
        first_layer=fields.integer("first_k_dense_replace", low=0, high=MAX_LAYERS),
        shared_size=num_shared * shared_size,
        num_groups=num_groups,
        num_groups_per_token=num_groups_per_token,
        scaling_factor=fields.number("routed_scaling_factor", low=1e-6, high=1e6),
        score_function="sigmoid",
        has_bias=fields.boolean("moe_router_enable_expert_bias", default=True),
        capacity=capacity,
        window_tokens=block_size if capacity else 0,
    )


def _read_groups(fields: Fields, num_experts: int, capacity: int) -> tuple[int, int]:
    # LLaDA2.2 still carries both numbers, but its capacity limit took their place.
    limit = num_experts if capacity == 0 else MAX_EXPERTS
    default = 1 if capacity else None
    num_groups = fields.integer("n_group", low=1, high=limit, default=default)
    per_token = fields.integer("topk_group", low=1, high=limit, default=default)
    return (1, 1) if capacity else (num_groups, per_token)


def schema(config: ModelConfig) -> ModelSchema:
    return decoder(
        config,
        _attention,
        _moe,
        names=NAMES,
        absent=tuple(_absent(config)),
    )


def _attention(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    prefix += "attention."
    spec, hidden = config.attention, config.hidden_size
    # Rows of the fused projection: all query heads, then all keys, then all values.
    fused = spec.query_size + 2 * spec.kv_size
    specs = [
        TensorSpec(prefix + "query_key_value.weight", (fused, hidden)),
        TensorSpec(prefix + "dense.weight", (hidden, spec.query_size)),
    ]
    if spec.has_qk_norm:
        for name in ("query_layernorm", "key_layernorm"):
            specs.append(vector(f"{prefix}{name}.weight", spec.head_dim))
    return specs


def _moe(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    specs = router(config, prefix)
    if config.moe.has_bias:
        # BF16 in LLaDA2.0, F32 in 2.1 and 2.2.
        specs.append(vector(prefix + "mlp.gate.expert_bias", config.moe.num_experts))
    if config.moe.shared_size:
        width = config.moe.shared_size
        specs += mlp(prefix + "mlp.shared_experts.", width, config.hidden_size)
    return specs


def _absent(config: ModelConfig) -> list[str]:
    names = []
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        names += [prefix + "attention.query_key_value.bias", prefix + "attention.dense.bias"]
        if not config.attention.has_qk_norm:
            names.append(prefix + "attention.query_layernorm.weight")
        if layer in config.moe_layers:
            if not config.moe.has_bias:
                names.append(prefix + "mlp.gate.expert_bias")
            if not config.moe.shared_size:
                names.append(prefix + "mlp.shared_experts.gate_proj.weight")
    return names


FAMILY = Family(
    name="llada2",
    architectures=("LLaDA2MoeModelLM",),
    published=Published((156892,), Blocks(mask_token_id=156895)),
    read=read,
    schema=schema,
    decoder=f"{__name__}.model:LLaDA2",
)
