"""Qwen3-MoE in GGUF files."""

from __future__ import annotations

from lowtide.families.gguf import QK_NORMS, USUAL, Config, GgufArchitecture, GgufKeys, usual_config


def _config(keys: GgufKeys) -> Config:
    return {
        **usual_config(keys, "Qwen3MoeForCausalLM"),
        "norm_topk_prob": True,
    }


GGUF = GgufArchitecture(name="qwen3moe", config=_config, names={**USUAL, **QK_NORMS})
