"""OLMoE in GGUF files."""

from __future__ import annotations

from lowtide.families.gguf import QK_NORMS, USUAL, Config, GgufArchitecture, GgufKeys, usual_config


def _config(keys: GgufKeys) -> Config:
    keys.only("attention.clamp_kqv", 0.0)
    return {
        **usual_config(keys, "OlmoeForCausalLM", "intermediate_size"),
        "norm_topk_prob": False,
    }


GGUF = GgufArchitecture(name="olmoe", config=_config, names={**USUAL, **QK_NORMS})
