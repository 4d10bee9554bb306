"""Mixtral (8x7B and relatives): `config.json`, tensors, sizes."""

from __future__ import annotations

from dataclasses import replace

from lowtide.config import ModelConfig, Published, keys
from lowtide.config.fields import MAX_POSITIONS, Fields
from lowtide.config.keys import Origin
from lowtide.families.family import Family
from lowtide.families.mixtral.gguf import GGUF
from lowtide.schemas.parts import decoder, separate_qkv, storages_of
from lowtide.schemas.schema import ExpertStorage, ModelSchema, TensorSpec


def read(fields: Fields, origin: Origin) -> ModelConfig:
    experts = keys.experts(fields, keys.width(fields, "intermediate_size"), norm_topk_prob=True)
    attention = keys.grouped_attention(fields, can_stretch=True)
    window = fields.optional_integer("sliding_window", low=1, high=MAX_POSITIONS)
    return keys.decoder(fields, origin, replace(attention, window=window or 0), experts)


def schema(config: ModelConfig) -> ModelSchema:
    return decoder(config, separate_qkv, _moe, storages=storages(config))


def storages(config: ModelConfig) -> tuple[ExpertStorage, ...]:
    """List the ways to store the experts, Mixtral's own first."""
    per_expert, published, *others = storages_of(config)
    return published, per_expert, *others


def _moe(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    # Files in transformers' own layout call the layer `mlp`.
    shape = (config.moe.num_experts, config.hidden_size)
    name, other_name = (f"{prefix}{x}.gate.weight" for x in ("block_sparse_moe", "mlp"))
    return [TensorSpec(name, shape, other_name=other_name, keeps_type=True)]


FAMILY = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    published=Published(eos_token_ids=(2,)),
    read=read,
    schema=schema,
    decoder=f"{__name__}.model:Mixtral",
    gguf=GGUF,
)
