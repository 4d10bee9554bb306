"""Qwen3-MoE (Qwen3-30B-A3B and relatives): `config.json`, tensors, sizes."""

from __future__ import annotations

from lowtide.config import ModelConfig, Published, keys
from lowtide.config.fields import Fields
from lowtide.config.keys import Origin
from lowtide.families.family import Family
from lowtide.families.qwen import qwen_dense_size, qwen_experts
from lowtide.families.qwen3_moe.gguf import GGUF
from lowtide.schemas.parts import decoder, in_layers, router, separate_qkv, vector
from lowtide.schemas.schema import ModelSchema, TensorSpec


def read(fields: Fields, origin: Origin) -> ModelConfig:
    fields.only("attention_bias", False)
    keys.refuse_sliding_windows(fields)
    attention = keys.grouped_attention(fields, can_stretch=True, has_qk_norm=True)
    experts = qwen_experts(fields)
    return keys.decoder(fields, origin, attention, experts, qwen_dense_size(fields, experts))


def schema(config: ModelConfig) -> ModelSchema:
    return decoder(config, _attention, router, absent=in_layers(config, "self_attn.q_proj.bias"))


def _attention(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    norms = [vector(f"{prefix}self_attn.{x}_norm.weight", config.attention.head_dim) for x in "qk"]
    return [*separate_qkv(config, prefix), *norms]


FAMILY = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    published=Published(eos_token_ids=(151645, 151643)),
    read=read,
    schema=schema,
    decoder=f"{__name__}.model:Qwen3Moe",
    gguf=GGUF,
)
