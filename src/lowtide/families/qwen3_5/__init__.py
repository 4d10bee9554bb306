"""Qwen3.5 and Qwen3.6 without experts (0.8B to 27B): `config.json`, tensors, sizes.

Published models also read images; the part that writes text is what runs.
"""

from __future__ import annotations

from lowtide.config import DenseSpec, ModelConfig, Published, keys
from lowtide.config.fields import Fields
from lowtide.config.keys import Origin
from lowtide.families.family import Family
from lowtide.families.qwen3_5.gguf import GGUF
from lowtide.families.qwen_hybrid import mixer_tensors, read_layers, with_centred_norms
from lowtide.schemas.parts import decoder
from lowtide.schemas.schema import ModelSchema


def read(fields: Fields, origin: Origin) -> ModelConfig:
    dense = DenseSpec(keys.width(fields, "intermediate_size"))
    return read_layers(fields, origin, [dense] * keys.num_layers(fields))


def schema(config: ModelConfig) -> ModelSchema:
    return with_centred_norms(decoder(config, mixer_tensors))


FAMILY = Family(
    name="qwen3_5",
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    published=Published(eos_token_ids=(248046, 248044)),
    read=read,
    schema=schema,
    decoder="lowtide.families.qwen3_5_moe.model:QwenHybrid",
    gguf=GGUF,
    series=("qwen3_6",),
)
