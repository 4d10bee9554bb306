"""DeepSeek-V3 and its relatives in GGUF files, which name them as they name DeepSeek-V2."""

from __future__ import annotations

from lowtide.families.deepseek_v2.gguf import NAMES, latent_config
from lowtide.families.gguf import Config, GgufArchitecture, GgufKeys, Names
from lowtide.families.sigmoid_experts import GGUF_NAMES, SIGMOID, gguf_sigmoid_experts

V3_NAMES: Names = {**NAMES, **GGUF_NAMES}
_GLM_VOCABULARY = 154880


def v3_config(keys: GgufKeys, architecture: str) -> Config:
    """Convert the metadata; layers for the prediction of further tokens are dropped."""
    return {
        **latent_config(keys, architecture),
        **gguf_sigmoid_experts(keys, default_norm=False),
        "num_hidden_layers": keys.integer("block_count")
        - keys.integer("nextn_predict_layers", default=0),
    }


def is_v3(keys: GgufKeys) -> bool:
    """Return True for experts that are chosen by sigmoids.

    Files of early 2026 do not name the function: a bias or GLM's vocabulary tells them from V2's.
    """
    function = keys.get("expert_gating_func")
    if function not in (None, 0):
        return function == SIGMOID
    return is_glm(keys) or any(name.endswith(".exp_probs_b.bias") for name in keys.shapes)


def is_glm(keys: GgufKeys) -> bool:
    """Return True for GLM-4.7-Flash, which a file tells by its vocabulary alone."""
    rows = keys.shapes.get("token_embd.weight", (keys.get("vocab_size"),))[0]
    return rows == _GLM_VOCABULARY


GGUF = GgufArchitecture(
    name="deepseek2",
    config=lambda keys: v3_config(keys, "DeepseekV3ForCausalLM"),
    names=V3_NAMES,
    suits=lambda keys: is_v3(keys) and not is_glm(keys),
)
