"""OLMoE in GGUF files."""

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
    keys.only("attention.clamp_kqv", 0.0)
    return {
        **usual_config(keys, "OlmoeForCausalLM", "intermediate_size"),
        "norm_topk_prob": False,
        "attention_bias": has_qkv_bias(keys),
    }


GGUF = GgufArchitecture(
    name="olmoe",
    config=_config,
    names={**USUAL, **QK_NORMS, **QKV_BIASES, **OUTPUT_BIAS},
)
