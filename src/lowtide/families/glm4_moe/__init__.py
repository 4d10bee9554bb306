"""GLM-4.5, 4.6 and 4.7 (GLM-4.5-Air and larger): `config.json`, tensors, sizes."""

from __future__ import annotations

from lowtide.config import ModelConfig, Published, keys
from lowtide.config.fields import MAX_EXPERTS, MAX_LAYERS, Fields
from lowtide.config.keys import Origin
from lowtide.families.family import Family
from lowtide.families.glm4_moe.gguf import GGUF
from lowtide.schemas.parts import decoder, in_layers, mlp, normed_qkv, router, vector
from lowtide.schemas.schema import ModelSchema, TensorSpec


def read(fields: Fields, origin: Origin) -> ModelConfig:
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    attention = keys.grouped_attention(
        fields,
        can_stretch=True,
        usual_factor=0.5,
        has_qk_norm=fields.boolean("use_qk_norm", default=False),
        has_qkv_bias=fields.boolean("attention_bias", default=False),
    )
    each, count = keys.expert_size(fields), keys.num_experts(fields)
    experts = keys.experts(
        fields,
        each,
        norm_topk_prob=fields.boolean("norm_topk_prob", default=True),
        first_layer=fields.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=1),
        shared_size=each * fields.integer("n_shared_experts", low=0, high=64, default=1),
        num_groups=fields.integer("n_group", low=1, high=count, default=1),
        num_groups_per_token=fields.integer("topk_group", low=1, high=MAX_EXPERTS, default=1),
        scaling_factor=fields.number("routed_scaling_factor", low=1e-6, high=1e6),
        score_function="sigmoid",
        has_bias=True,
    )
    dense_size = keys.width(fields, "intermediate_size")
    return keys.decoder(fields, origin, attention, experts, dense_size)


def schema(config: ModelConfig) -> ModelSchema:
    attention = config.attention
    absent: tuple[str, ...] = ()
    if not attention.has_qkv_bias:
        absent += in_layers(config, "self_attn.q_proj.bias")
    if not attention.has_qk_norm:
        absent += in_layers(config, "self_attn.q_norm.weight")
    return decoder(config, normed_qkv, _moe, absent=absent)


def _moe(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    specs = router(config, prefix)
    specs.append(vector(prefix + "mlp.gate.e_score_correction_bias", config.moe.num_experts))
    if config.moe.shared_size:
        specs += mlp(prefix + "mlp.shared_experts.", config.moe.shared_size, config.hidden_size)
    return specs


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
