"""Qwen3 without experts: `config.json`, tensors, sizes."""

from __future__ import annotations

from lowtide.config import ModelConfig, Published
from lowtide.config.fields import Fields
from lowtide.config.keys import Origin
from lowtide.families.dense import dense_schema, read_dense
from lowtide.families.family import Family
from lowtide.families.qwen import windows
from lowtide.families.qwen3.gguf import GGUF
from lowtide.schemas.schema import ModelSchema


def read(fields: Fields, origin: Origin) -> ModelConfig:
    has_bias = fields.boolean("attention_bias", default=False)
    return read_dense(fields, origin, windows(fields), has_qkv_bias=has_bias, has_qk_norm=True)


def schema(config: ModelConfig) -> ModelSchema:
    return dense_schema(config, has_output_bias=config.attention.has_qkv_bias)


FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    published=Published(eos_token_ids=(151645, 151643)),
    read=read,
    schema=schema,
    decoder=f"{__name__}.model:Qwen3",
    gguf=GGUF,
)
