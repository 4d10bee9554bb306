"""GLM-4.5 and later in GGUF files, whose last layer (MTP) is dropped."""

from __future__ import annotations

from lowtide.families.gguf import (
    QK_NORMS,
    QKV_BIASES,
    USUAL,
    Config,
    GgufArchitecture,
    GgufKeys,
    has_qkv_bias,
    mlp,
    usual_config,
)
from lowtide.families.sigmoid_experts import GGUF_NAMES, SIGMOID, gguf_sigmoid_experts


def _config(keys: GgufKeys) -> Config:
    keys.only("expert_gating_func", 0, SIGMOID)  # 0: as usual
    return {
        **usual_config(keys, "Glm4MoeForCausalLM", can_group=True),
        **gguf_sigmoid_experts(keys, default_norm=True),
        "num_hidden_layers": keys.integer("block_count")
        - keys.integer("nextn_predict_layers", default=0),
        "attention_bias": has_qkv_bias(keys),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.shapes,
        "intermediate_size": keys.need("feed_forward_length"),
    }


_NORM = "model.layers.#.post_attention_layernorm.weight"

GGUF = GgufArchitecture(
    name="glm4moe",
    config=_config,
    names={
        **{name: ours for name, ours in USUAL.items() if ours != _NORM},
        "blk.#.post_attention_norm.weight": _NORM,
        **QKV_BIASES,
        **QK_NORMS,
        **mlp("", "mlp."),
        **GGUF_NAMES,
    },
)
