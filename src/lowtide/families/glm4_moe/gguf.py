"""GLM-4.5 and later in GGUF files, whose last layer (MTP) is dropped."""

from __future__ import annotations

from lowtide.families.gguf import (
    QK_NORMS,
    QKV_BIASES,
    USUAL,
    Config,
    GgufArchitecture,
    GgufKeys,
    mlp,
    usual_config,
)

_SIGMOID = 2


def _config(keys: GgufKeys) -> Config:
    keys.only("expert_gating_func", _SIGMOID)
    norm_topk_prob = keys.get("expert_weights_norm")
    return {
        **usual_config(keys, "Glm4MoeForCausalLM", can_group=True),
        "num_hidden_layers": keys.integer("block_count")
        - keys.integer("nextn_predict_layers", default=0),
        "attention_bias": not {"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"}.isdisjoint(keys.shapes),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.shapes,
        "intermediate_size": keys.need("feed_forward_length"),
        "n_shared_experts": keys.integer("expert_shared_count", default=1),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", default=0),
        "norm_topk_prob": True if norm_topk_prob is None else norm_topk_prob,
        "routed_scaling_factor": keys.get("expert_weights_scale") or 1.0,
        "n_group": keys.get("expert_group_count") or 1,
        "topk_group": keys.get("expert_group_used_count") or 1,
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
        **mlp("_shexp", "mlp.shared_experts."),
        "blk.#.exp_probs_b.bias": "model.layers.#.mlp.gate.e_score_correction_bias",
    },
)
