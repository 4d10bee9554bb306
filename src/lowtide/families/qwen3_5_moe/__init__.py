"""Qwen3.5 and Qwen3.6 with experts (35B-A3B, 122B-A10B, 397B-A17B): `config.json`, tensors, sizes.

Published models also read images; the part that writes text is what runs.
"""

from __future__ import annotations

from lowtide.config import ModelConfig, Published, keys
from lowtide.config.fields import Fields
from lowtide.config.keys import Origin
from lowtide.families.family import Family
from lowtide.families.qwen3_5_moe.gguf import GGUF
from lowtide.families.qwen_hybrid import (
    mixer_tensors,
    moe_tensors,
    read_layers,
    shared_size,
    with_centred_norms,
)
from lowtide.schemas.parts import decoder
from lowtide.schemas.schema import ModelSchema


def read(fields: Fields, origin: Origin) -> ModelConfig:
    fields.only("norm_topk_prob", True)
    fields.only("mlp_only_layers", [])
    fields.only("decoder_sparse_step", 1)
    experts = keys.experts(
        fields, keys.expert_size(fields), norm_topk_prob=True, shared_size=shared_size(fields)
    )
    return read_layers(fields, origin, [experts] * keys.num_layers(fields))


def schema(config: ModelConfig) -> ModelSchema:
    return with_centred_norms(decoder(config, mixer_tensors, moe_tensors))


FAMILY = Family(
    name="qwen3_5_moe",
    architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    published=Published(eos_token_ids=(248046, 248044)),
    read=read,
    schema=schema,
    decoder=f"{__name__}.model:QwenHybrid",
    gguf=GGUF,
    series=("qwen3_6_moe",),
)
