"""DeepSeek-V3 and R1, Kimi-K2, Moonlight, GigaChat 3, Kanana-2: `config.json`, tensors, sizes."""

from __future__ import annotations

from collections.abc import Collection

from lowtide.config import ModelConfig, Published, keys
from lowtide.config.fields import MAX_LAYERS, Fields
from lowtide.config.keys import Origin
from lowtide.config.specs import ExpertSpec
from lowtide.families.deepseek_v2 import attention, read_attention
from lowtide.families.deepseek_v3.gguf import GGUF
from lowtide.families.family import Family
from lowtide.families.sigmoid_experts import absent_shared, read_sigmoid_experts, sigmoid_moe
from lowtide.schemas.parts import decoder
from lowtide.schemas.schema import ModelSchema

_USUAL_GROUPS = (8, 4)
"""Groups of experts, and of a token, where the config names none."""


def read(fields: Fields, origin: Origin) -> ModelConfig:
    fields.only("moe_layer_freq", 1)
    first_layer = fields.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=3)
    moe_layers = range(first_layer, keys.num_layers(fields))
    experts = read_sigmoid_experts(fields, usual_groups=_USUAL_GROUPS)
    return read_with(fields, origin, experts, moe_layers)


def read_with(
    fields: Fields, origin: Origin, experts: ExpertSpec, moe_layers: Collection[int]
) -> ModelConfig:
    """Read a model of latent attention and these experts in some layers."""
    fields.only("attention_bias", False)
    # As in transformers, null switches it off.
    is_interleaved = fields.boolean(
        "rope_interleave", default=not fields.is_null("rope_interleave")
    )
    dense_size = keys.width(fields, "intermediate_size")
    latent = read_attention(fields, is_interleaved)
    return keys.decoder(fields, origin, latent, experts, dense_size, moe_layers=moe_layers)


def schema(config: ModelConfig) -> ModelSchema:
    return decoder(config, attention, sigmoid_moe, absent=absent_shared(config))


FAMILY = Family(
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    published=Published(eos_token_ids=(1,)),
    read=read,
    schema=schema,
    decoder=f"{__name__}.model:DeepseekV3",
    gguf=GGUF,
    series=("deepseek_r1", "gigachat3", "kimi_k2", "moonlight"),
)
