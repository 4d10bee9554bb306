"""Ling 2.0 in GGUF files, whose last layers may be MTP layers, which are dropped."""

from __future__ import annotations

from lowtide.families.gguf import (
    ENDS,
    EXPERTS,
    NORMS,
    ROUTER,
    Config,
    GgufArchitecture,
    GgufKeys,
    mlp,
    shared_width,
    usual_config,
)

_ATTENTION = "model.layers.#.attention."
_SIGMOID = 2


def _config(keys: GgufKeys) -> Config:
    keys.only("expert_gating_func", _SIGMOID)
    num_predicting = keys.integer("nextn_predict_layers", default=0)
    width = shared_width(keys)
    first = keys.integer("leading_dense_block_count", default=0)
    return {
        **usual_config(keys, "BailingMoeV2ForCausalLM", can_group=True),
        "num_hidden_layers": keys.integer("block_count") - num_predicting,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.shapes,
        "intermediate_size": keys.need("feed_forward_length"),
        "num_shared_experts": int(width > 0),
        "moe_shared_expert_intermediate_size": width or None,
        "first_k_dense_replace": first,
        "norm_topk_prob": keys.get("expert_weights_norm") or False,
        "routed_scaling_factor": keys.get("expert_weights_scale") or 1.0,
        "moe_router_enable_expert_bias": f"blk.{first}.exp_probs_b.bias" in keys.shapes,
        "n_group": keys.get("expert_group_count") or 1,
        "topk_group": keys.get("expert_group_used_count") or 1,
    }


GGUF = GgufArchitecture(
    name="bailingmoe2",
    config=_config,
    names={
        **ENDS,
        **NORMS,
        **ROUTER,
        **EXPERTS,
        **mlp("", "mlp."),
        **mlp("_shexp", "mlp.shared_experts."),
        "token_embd.weight": "model.word_embeddings.weight",
        "blk.#.attn_qkv.weight": _ATTENTION + "query_key_value.weight",
        "blk.#.attn_output.weight": _ATTENTION + "dense.weight",
        "blk.#.attn_q_norm.weight": _ATTENTION + "query_layernorm.weight",
        "blk.#.attn_k_norm.weight": _ATTENTION + "key_layernorm.weight",
        "blk.#.exp_probs_b.bias": "model.layers.#.mlp.gate.expert_bias",
    },
)
