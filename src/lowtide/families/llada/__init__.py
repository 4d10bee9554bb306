"""LLaDA (8B, 1.5) and relatives: `config.json`, tensors, sizes.

A dense model with OLMo's config keys and tensor names. LLaDA-MoE shares its `model_type` but has
another architecture.
"""

from __future__ import annotations

from functools import partial

from lowtide.config import Canvas, DecodingDefaults, ModelConfig, Published, keys
from lowtide.config.fields import Fields
from lowtide.config.keys import Origin
from lowtide.families.family import Family
from lowtide.families.llada.names import NAMES
from lowtide.schemas.parts import decoder, in_layers, separate_qkv
from lowtide.schemas.schema import ModelSchema

_KEYS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "intermediate_size": "mlp_hidden_size",
    "max_position_embeddings": "max_sequence_length",
    "tie_word_embeddings": "weight_tying",
    "hidden_act": "activation_type",
}
"""This file's key for each usual key."""

_SUPPORTED = {
    "block_type": "llama",
    "block_group_size": 1,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "rope": True,
    "rope_full_precision": True,
    "alibi": False,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "multi_query_attention": False,
    "scale_logits": False,
}


def read(fields: Fields, origin: Origin) -> ModelConfig:
    for name, value in _SUPPORTED.items():
        fields.only(name, value)
    fields.refuse("clip_qkv")
    # Padding rows of the vocabulary would be ids without text.
    fields.only("embedding_size", fields.raw("vocab_size"))
    fields = fields.renamed(_KEYS)
    # Without an explicit width the MLP is `mlp_ratio` times as wide as the hidden states.
    ratio = fields.integer("mlp_ratio", low=1, high=1024, default=4)
    width = keys.width(
        fields, "intermediate_size", default=ratio * keys.width(fields, "hidden_size")
    )
    attention = keys.grouped_attention(fields)
    return keys.decoder(fields, origin, attention, None, width)


def schema(config: ModelConfig) -> ModelSchema:
    absent = ("q_norm.weight", "k_norm.weight", "q_proj.bias", "attn_out.bias", "ff_proj.bias")
    return decoder(
        config,
        partial(separate_qkv, names=NAMES),
        names=NAMES,
        absent=in_layers(config, *absent, names=NAMES),
    )


FAMILY = Family(
    name="llada",
    architectures=("LLaDAModelLM",),
    published=Published(
        (126081,),
        Canvas(
            mask_token_id=126336,
            defaults=DecodingDefaults(block_length=128, steps=128, threshold=None),
        ),
    ),
    read=read,
    schema=schema,
    decoder=f"{__name__}.model:LLaDA",
)
