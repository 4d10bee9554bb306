"""GLM-4.5, 4.6 and 4.7 (GLM-4.5-Air and larger): `config.json`, tensors, sizes."""

from __future__ import annotations

from lowtide.config import ModelConfig, Published, keys
from lowtide.config.fields import MAX_LAYERS, Fields
from lowtide.config.keys import Origin
from lowtide.families.family import Family
from lowtide.families.glm4_moe.gguf import GGUF
from lowtide.families.sigmoid_experts import absent_shared, read_sigmoid_experts, sigmoid_moe
from lowtide.schemas.parts import decoder, in_layers, normed_qkv
from lowtide.schemas.schema import ModelSchema


def read(fields: Fields, origin: Origin) -> ModelConfig:
    attention = keys.grouped_attention(
        fields,
        can_stretch=True,
        usual_factor=0.5,
        has_qk_norm=fields.boolean("use_qk_norm", default=False),
        has_qkv_bias=fields.boolean("attention_bias", default=False),
    )
    first_layer = fields.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=1)
    experts = read_sigmoid_experts(fields, first_layer)
    dense_size = keys.width(fields, "intermediate_size")
    return keys.decoder(fields, origin, attention, experts, dense_size)


def schema(config: ModelConfig) -> ModelSchema:
    attention = config.attention
    absent = absent_shared(config)
    if not attention.has_qkv_bias:
        absent += in_layers(config, "self_attn.q_proj.bias")
    if not attention.has_qk_norm:
        absent += in_layers(config, "self_attn.q_norm.weight")
    return decoder(config, normed_qkv, sigmoid_moe, absent=absent)


FAMILY = Family(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    # <|endoftext|>, <|user|>, <|observation|>
    published=Published(eos_token_ids=(151329, 151336, 151338)),
    read=read,
    schema=schema,
    decoder=f"{__name__}.model:Glm4Moe",
    gguf=GGUF,
)
