"""Llama in GGUF files: "llama" without experts."""

from __future__ import annotations

from lowtide.families.gguf import (
    DENSE,
    OUTPUT_BIAS,
    ROPE_DIVISORS,
    TURNED_QK,
    V_BIAS,
    Config,
    GgufArchitecture,
    GgufKeys,
    dense_config,
    has_qkv_bias,
)


def _config(keys: GgufKeys) -> Config:
    keys.only("attention.sliding_window", 0)
    keys.only("attention.scale", 0.0)
    return {
        **dense_config(keys, "LlamaForCausalLM"),
        "attention_bias": has_qkv_bias(keys),
    }


GGUF = GgufArchitecture(
    name="llama",
    config=_config,
    names={
        **DENSE,
        **TURNED_QK,
        **V_BIAS,
        **OUTPUT_BIAS,
        ROPE_DIVISORS: ROPE_DIVISORS,  # read with the metadata
    },
)
