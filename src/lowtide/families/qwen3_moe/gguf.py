"""Qwen3-MoE in GGUF files."""

from __future__ import annotations

from lowtide.families.gguf import (
    OUTPUT_BIAS,
    QK_NORMS,
    QKV_BIASES,
    USUAL,
    Config,
    GgufArchitecture,
    GgufKeys,
    has_qkv_bias,
    usual_config,
)


def _config(keys: GgufKeys) -> Config:
    return {
        **usual_config(keys, "Qwen3MoeForCausalLM"),
        "norm_topk_prob": True,
        "attention_bias": has_qkv_bias(keys),
    }


GGUF = GgufArchitecture(
    name="qwen3moe",
    config=_config,
    names={**USUAL, **QK_NORMS, **QKV_BIASES, **OUTPUT_BIAS},
)
