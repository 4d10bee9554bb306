"""Qwen2-MoE (Qwen1.5-MoE-A2.7B and relatives): `config.json`, tensors, sizes."""

from __future__ import annotations

from lowtide.config import ModelConfig, Published, keys
from lowtide.config.fields import Fields
from lowtide.config.keys import Origin
from lowtide.families.family import Family
from lowtide.families.qwen import qwen_decoder, qwen_experts
from lowtide.families.qwen2_moe.gguf import GGUF
from lowtide.schemas.parts import decoder, in_layers, mlp, router, separate_qkv
from lowtide.schemas.schema import ModelSchema, TensorSpec


def read(fields: Fields, origin: Origin) -> ModelConfig:
    keys.refuse_sliding_windows(fields)
    has_qkv_bias = fields.boolean("qkv_bias", default=True)
    attention = keys.grouped_attention(fields, can_stretch=True, has_qkv_bias=has_qkv_bias)
    experts = qwen_experts(fields, keys.width(fields, "shared_expert_intermediate_size"))
    return qwen_decoder(fields, origin, attention, experts)


def schema(config: ModelConfig) -> ModelSchema:
    has_bias = config.attention.has_qkv_bias
    absent = () if has_bias else in_layers(config, "self_attn.q_proj.bias")
    return decoder(config, separate_qkv, _moe, absent=absent)


def _moe(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    shared = mlp(prefix + "mlp.shared_expert.", config.moe.shared_size, config.hidden_size)
    gate = TensorSpec(
        prefix + "mlp.shared_expert_gate.weight", (1, config.hidden_size), keeps_type=True
    )
    return [*router(config, prefix), *shared, gate]


FAMILY = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    published=Published(eos_token_ids=(151643,)),
    read=read,
    schema=schema,
    decoder=f"{__name__}.model:Qwen2Moe",
    gguf=GGUF,
)
