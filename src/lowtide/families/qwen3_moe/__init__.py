"""Qwen3-MoE (Qwen3-30B-A3B and relatives): `config.json`, tensors, sizes."""

from __future__ import annotations

from lowtide.config import ModelConfig, Published, keys
from lowtide.config.fields import Fields
from lowtide.config.keys import Origin
from lowtide.families.family import Family
from lowtide.families.qwen import qwen_decoder, qwen_experts
from lowtide.families.qwen3_moe.gguf import GGUF
from lowtide.schemas.parts import decoder, in_layers, normed_attention, router
from lowtide.schemas.schema import ModelSchema


def read(fields: Fields, origin: Origin) -> ModelConfig:
    keys.refuse_sliding_windows(fields)
    has_bias = fields.boolean("attention_bias", default=False)
    attention = keys.grouped_attention(
        fields, can_stretch=True, has_qk_norm=True, has_qkv_bias=has_bias
    )
    experts = qwen_experts(fields)
    return qwen_decoder(fields, origin, attention, experts)


def schema(config: ModelConfig) -> ModelSchema:
    has_bias = config.attention.has_qkv_bias
    absent = () if has_bias else in_layers(config, "self_attn.q_proj.bias")
    return decoder(config, normed_attention, router, absent=absent)


FAMILY = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    published=Published(eos_token_ids=(151645, 151643)),
    read=read,
    schema=schema,
    decoder=f"{__name__}.model:Qwen3Moe",
    gguf=GGUF,
)
