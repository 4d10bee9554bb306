"""Qwen3 in GGUF files."""

from __future__ import annotations

from lowtide.families.gguf import (
    DENSE,
    OUTPUT_BIAS,
    QK_NORMS,
    QKV_BIASES,
    Config,
    GgufArchitecture,
    GgufKeys,
    dense_config,
    has_qkv_bias,
)


def _config(keys: GgufKeys) -> Config:
    return {
        **dense_config(keys, "Qwen3ForCausalLM"),
        "attention_bias": has_qkv_bias(keys),
    }


GGUF = GgufArchitecture(
    name="qwen3",
    config=_config,
    names={**DENSE, **QK_NORMS, **QKV_BIASES, **OUTPUT_BIAS},
)
