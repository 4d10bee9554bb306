"""LLaDA-MoE (7B-A1B): `config.json`, tensors, sizes.

Shares its `model_type` with the dense LLaDA; the architectures differ. A converted checkpoint
(`FusedLLaDAMoEModelLM`) differs only in how experts are stacked.
"""

from __future__ import annotations

from lowtide.config import Canvas, DecodingDefaults, ModelConfig, Published, keys
from lowtide.config.fields import OTHER_MODEL, Fields
from lowtide.config.keys import Origin
from lowtide.errors import UnsupportedError
from lowtide.families.family import Family
from lowtide.schemas.parts import decoder, in_layers, normed_qkv, router
from lowtide.schemas.schema import ModelSchema


def read(fields: Fields, origin: Origin) -> ModelConfig:
    for name in ("attention_bias", "moe_router_enable_expert_bias", "norm_topk_prob"):
        fields.only(name, False)
    fields.only("moe_router_score_function", "softmax")
    for name in (
        "clip_qkv",
        "router_num_group",
        "router_topk_group",
        "shared_expert_intermediate_size",
    ):
        fields.refuse(name)
    _refuse_scaling(fields)
    experts = keys.experts(fields, keys.expert_size(fields), norm_topk_prob=False)
    has_qk_norm = fields.boolean("qk_layernorm", default=True)
    attention = keys.grouped_attention(fields, has_qk_norm=has_qk_norm)
    moe_layers = _moe_layers(fields)
    dense_size = 0
    if len(moe_layers) < keys.num_layers(fields):
        dense_size = keys.width(fields, "dense_intermediate_size")
    return keys.decoder(fields, origin, attention, experts, dense_size, moe_layers=moe_layers)


def _refuse_scaling(fields: Fields) -> None:
    """Refuse a scaling factor: the published code has the key but ignores it."""
    factor = fields.optional_number("routed_scaling_factor", low=0.0, high=1e6)
    if factor not in (None, 1.0):
        raise UnsupportedError(
            f"config.json: routed_scaling_factor {factor:g} is not supported, only 1; "
            f"{OTHER_MODEL}."
        )


def _moe_layers(fields: Fields) -> list[int]:
    """Return the layers with experts: those with a 1 in moe_layer_freq, by default all."""
    count, given = keys.num_layers(fields), fields.raw("moe_layer_freq")
    if given is None:
        return list(range(count))
    flags = given if isinstance(given, list | tuple) else [given] * count
    if len(flags) < count or any(flag not in (0, 1) for flag in flags):
        raise fields.error("moe_layer_freq", f"must be 1 or a list of 1 or 0 for {count} layers")
    return [layer for layer in range(count) if flags[layer]]


def schema(config: ModelConfig) -> ModelSchema:
    absent = ["self_attn.q_proj.bias", "mlp.gate.expert_bias", "shared_expert.gate_proj.weight"]
    if not config.attention.has_qk_norm:
        absent.append("self_attn.q_norm.weight")
    return decoder(config, normed_qkv, router, absent=in_layers(config, *absent))


FAMILY = Family(
    name="llada_moe",
    architectures=("LLaDAMoEModelLM", "LLaDAMoEModel", "FusedLLaDAMoEModelLM"),
    published=Published(
        (156892,),
        Canvas(
            mask_token_id=156895,
            defaults=DecodingDefaults(block_length=32, steps=128, threshold=None),
        ),
    ),
    read=read,
    schema=schema,
    decoder=f"{__name__}.model:LLaDAMoE",
)
