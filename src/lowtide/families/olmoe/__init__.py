"""OLMoE (1B-7B): `config.json`, tensors, sizes."""

from __future__ import annotations

from lowtide.config import ModelConfig, Published, keys
from lowtide.config.fields import Fields
from lowtide.config.keys import Origin
from lowtide.families.family import Family
from lowtide.families.olmoe.gguf import GGUF
from lowtide.schemas.parts import decoder, in_layers, output_bias, router, separate_qkv, vector
from lowtide.schemas.schema import ModelSchema, TensorSpec


def read(fields: Fields, origin: Origin) -> ModelConfig:
    fields.refuse("clip_qkv")
    has_bias = fields.boolean("attention_bias", default=False)
    is_normalised = fields.boolean("norm_topk_prob", default=False)
    experts = keys.experts(fields, keys.width(fields, "intermediate_size"), is_normalised)
    grouped = keys.grouped_attention(
        fields, can_stretch=True, has_qk_norm=True, has_qkv_bias=has_bias
    )
    return keys.decoder(fields, origin, grouped, experts)


def schema(config: ModelConfig) -> ModelSchema:
    has_bias = config.attention.has_qkv_bias
    absent = () if has_bias else in_layers(config, "self_attn.q_proj.bias")
    return decoder(config, attention, router, absent=absent)


def attention(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    # The norms are as wide as all heads together.
    norms = [
        vector(prefix + "self_attn.q_norm.weight", config.attention.query_size),
        vector(prefix + "self_attn.k_norm.weight", config.attention.kv_size),
    ]
    return [*separate_qkv(config, prefix), *output_bias(config, prefix), *norms]


FAMILY = Family(
    name="olmoe",
    architectures=("OlmoeForCausalLM",),
    published=Published(eos_token_ids=(50279,)),
    read=read,
    schema=schema,
    decoder=f"{__name__}.model:Olmoe",
    gguf=GGUF,
)
