"""Qwen3-Next and Qwen3-Coder-Next (80B-A3B): `config.json`, tensors, sizes."""

from __future__ import annotations

from lowtide.config import DenseSpec, ExpertSpec, ModelConfig, Published, keys
from lowtide.config.fields import Fields
from lowtide.config.keys import Origin
from lowtide.families.family import Family
from lowtide.families.qwen import moe_layers
from lowtide.families.qwen3_next.gguf import GGUF, SPLIT_KEY
from lowtide.families.qwen_hybrid import (
    as_stored,
    mixer_tensors,
    moe_tensors,
    read_layers,
    shared_size,
    with_centred_norms,
)
from lowtide.schemas.parts import decoder
from lowtide.schemas.schema import ModelSchema


def read(fields: Fields, origin: Origin) -> ModelConfig:
    experts = keys.experts(
        fields,
        keys.expert_size(fields),
        norm_topk_prob=fields.boolean("norm_topk_prob", default=True),
        shared_size=shared_size(fields),
    )
    sparse = moe_layers(fields)
    every = len(sparse) == keys.num_layers(fields)
    dense = None if every else DenseSpec(keys.width(fields, "intermediate_size"))
    mlps: list[DenseSpec | ExpertSpec] = [
        experts if dense is None or layer in sparse else dense
        for layer in range(keys.num_layers(fields))
    ]
    is_split = fields.boolean(SPLIT_KEY, default=False)
    return read_layers(fields, origin, mlps, is_fused=not is_split, is_joint=True)


def schema(config: ModelConfig) -> ModelSchema:
    return with_centred_norms(decoder(config, mixer_tensors, moe_tensors))


FAMILY = Family(
    name="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    published=Published(eos_token_ids=(151645, 151643)),
    read=read,
    schema=schema,
    decoder="lowtide.families.qwen3_5_moe.model:QwenHybrid",
    gguf=GGUF,
    as_stored=as_stored,
)
