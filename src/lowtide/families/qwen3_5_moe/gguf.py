"""Qwen3.5 and Qwen3.6 with experts in GGUF files, whose last layer (MTP), if any, is dropped."""

from __future__ import annotations

from lowtide.families.gguf import Config, GgufArchitecture, GgufKeys, shared_width, usual_config
from lowtide.families.qwen_hybrid import GGUF_EXPERT_NAMES, GGUF_NAMES, gguf_layers


def _config(keys: GgufKeys) -> Config:
    return {
        **usual_config(keys, "Qwen3_5MoeForCausalLM"),
        **gguf_layers(keys, is_tiled=True),
        "shared_expert_intermediate_size": shared_width(keys),
    }


GGUF = GgufArchitecture(name="qwen35moe", config=_config, names={**GGUF_NAMES, **GGUF_EXPERT_NAMES})
