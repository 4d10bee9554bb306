"""DeepSeek-V2 in GGUF files, which store the expansion of keys and values as one matrix or two."""

from __future__ import annotations

from lowtide.config import LatentAttentionSpec, ModelConfig
from lowtide.families.gguf import (
    ENDS,
    EXPERTS,
    NORMS,
    OUTPUT,
    ROUTER,
    Config,
    GgufArchitecture,
    GgufKeys,
    Names,
    RearrangedTensor,
    Value,
    mlp,
    usual_config,
)
from lowtide.model_folder.checkpoint import ArrayView

_ATTENTION = "model.layers.#.self_attn."
_NUM_EXPERTS_OF_V2 = 160


def _config(keys: GgufKeys) -> Config:
    keys.only("expert_gating_func", 0, 1)  # softmax; absent in older files
    keys.only("expert_weights_norm", False)
    return {
        **latent_config(keys, "DeepseekV2ForCausalLM"),
        **_groups(keys),
        "n_shared_experts": keys.get("expert_shared_count") or 0,
        "first_k_dense_replace": keys.get("leading_dense_block_count") or 0,
        "routed_scaling_factor": keys.get("expert_weights_scale") or 1.0,
        "norm_topk_prob": False,
    }


def latent_config(keys: GgufKeys, architecture: str) -> Config:
    """Convert the metadata of models with latent attention, all but their experts."""
    if keys.get("attention.temperature_scale"):
        keys.refuse("mistrallarge3")
    rotary_dim = keys.integer("rope.dimension_count")
    config: Config = {
        **usual_config(keys, architecture, can_group=True),
        "intermediate_size": keys.need("feed_forward_length"),
        "kv_lora_rank": keys.need("attention.kv_lora_rank"),
        "q_lora_rank": keys.get("attention.q_lora_rank") or None,
        "qk_rope_head_dim": rotary_dim,
        "qk_nope_head_dim": _integer_of_a_head(keys, "key_length") - rotary_dim,
        "v_head_dim": _integer_of_a_head(keys, "value_length"),
    }
    return {**config, "rope_scaling": _rope_scaling(keys, config.get("rope_scaling"))}


def _integer_of_a_head(keys: GgufKeys, name: str) -> int:
    """Read a per-head integer; in newer files the plain keys describe the shared latent instead."""
    newer = f"attention.{name}_mla"
    return keys.integer(newer if keys.get(newer) is not None else f"attention.{name}")


def _groups(keys: GgufKeys) -> Config:
    """Read the group limits, which older files lack; 160 experts then mean DeepSeek-V2 or V2.5."""
    count = keys.integer("expert_group_count", default=0)
    if count == 0 and keys.get("expert_count") == _NUM_EXPERTS_OF_V2:
        return {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    if count <= 1:
        return {"topk_method": "greedy"}
    return {
        "topk_method": "group_limited_greedy",
        "n_group": count,
        "topk_group": keys.need("expert_group_used_count"),
    }


def _rope_scaling(keys: GgufKeys, scaling: Value) -> Value:
    """Add `mscale`: the stored multiplier is a tenth of it and of `mscale_all_dim`.

    Every published model has equal values for the two.
    """
    multiplier = keys.get("rope.scaling.yarn_log_multiplier")
    if not isinstance(scaling, dict) or not isinstance(multiplier, float):
        return scaling
    weight = float(f"{10 * multiplier:.6g}")
    return {**scaling, "mscale": weight, "mscale_all_dim": weight}


def _keys(config: ModelConfig) -> ArrayView:
    return ArrayView(_expansion(config), order=(0, 2, 1), axis=1, stop=_fixed_dim(config))


def _values(config: ModelConfig) -> ArrayView:
    return ArrayView(_expansion(config), order=(0, 1, 2), axis=1, start=_fixed_dim(config))


def _fixed_dim(config: ModelConfig) -> int:
    """Return the dimensions of a head's keys that do not rotate."""
    spec = config.mixer(LatentAttentionSpec)
    return spec.head_dim - spec.rope.rotary_dim


def _expansion(config: ModelConfig) -> tuple[int, int, int]:
    spec = config.mixer(LatentAttentionSpec)
    return spec.num_heads, _fixed_dim(config) + spec.value_head_dim, spec.kv_lora_rank


NAMES: Names = {
    **ENDS,
    **NORMS,
    **OUTPUT,
    **ROUTER,
    **EXPERTS,
    **mlp("", "mlp."),
    **mlp("_shexp", "mlp.shared_experts."),
    "blk.#.attn_q.weight": _ATTENTION + "q_proj.weight",
    "blk.#.attn_q_a.weight": _ATTENTION + "q_a_proj.weight",
    "blk.#.attn_q_a_norm.weight": _ATTENTION + "q_a_layernorm.weight",
    "blk.#.attn_q_b.weight": _ATTENTION + "q_b_proj.weight",
    "blk.#.attn_kv_a_mqa.weight": _ATTENTION + "kv_a_proj_with_mqa.weight",
    "blk.#.attn_kv_a_norm.weight": _ATTENTION + "kv_a_layernorm.weight",
    "blk.#.attn_kv_b.weight": _ATTENTION + "kv_b_proj.weight",
    "blk.#.attn_k_b.weight": RearrangedTensor(_ATTENTION + "kv_b_proj.weight", _keys),
    "blk.#.attn_v_b.weight": RearrangedTensor(_ATTENTION + "kv_b_proj.weight", _values),
}

GGUF = GgufArchitecture(name="deepseek2", config=_config, names=NAMES)
