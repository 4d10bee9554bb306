"""Llama (2, 3 and models built like it, such as SmolLM2): `config.json`, tensors, sizes."""

from __future__ import annotations

from lowtide.config import ModelConfig, Published, keys
from lowtide.config.fields import Fields
from lowtide.config.keys import Origin
from lowtide.families.dense import dense_schema, read_dense
from lowtide.families.family import Family
from lowtide.families.llama.gguf import GGUF
from lowtide.schemas.schema import ModelSchema


def read(fields: Fields, origin: Origin) -> ModelConfig:
    fields.only("mlp_bias", False)
    fields.refuse("sliding_window")
    keys.refuse_sliding_windows(fields)
    has_bias = fields.boolean("attention_bias", default=False)
    windows = [0] * keys.num_layers(fields)
    return read_dense(fields, origin, windows, has_qkv_bias=has_bias)


def schema(config: ModelConfig) -> ModelSchema:
    return dense_schema(config, has_output_bias=config.attention.has_qkv_bias)


FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    series=("codellama", "deepseek_r1_distill", "meta_llama", "smollm", "tinyllama", "yi"),
    published=Published(eos_token_ids=(2,)),
    read=read,
    schema=schema,
    decoder=f"{__name__}.model:Llama",
    gguf=GGUF,
)
