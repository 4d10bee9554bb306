"""Experts of GLM-4.5 and DeepSeek-V3: chosen by sigmoids and a learned bias; one is shared."""

from __future__ import annotations

from lowtide.config import ExpertSpec, ModelConfig, keys
from lowtide.config.fields import MAX_EXPERTS, Fields
from lowtide.families.gguf import Config, GgufKeys, Names, mlp
from lowtide.schemas import parts
from lowtide.schemas.schema import TensorSpec

SIGMOID = 2
"""Value of `expert_gating_func` in GGUF files."""

GGUF_NAMES: Names = {
    **mlp("_shexp", "mlp.shared_experts."),
    "blk.#.exp_probs_b.bias": "model.layers.#.mlp.gate.e_score_correction_bias",
}


def read_sigmoid_experts(
    fields: Fields, first_layer: int = 0, usual_groups: tuple[int, int] = (1, 1)
) -> ExpertSpec:
    """Read the experts.

    first_layer: the first that has any, if all after it do.
    usual_groups: groups of experts, and of a token, where the config names none.
    """
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    each, count = keys.expert_size(fields), keys.num_experts(fields)
    return keys.experts(
        fields,
        each,
        # As in transformers, null switches it off.
        norm_topk_prob=fields.boolean(
            "norm_topk_prob", default=not fields.is_null("norm_topk_prob")
        ),
        first_layer=first_layer,
        shared_size=each * fields.integer("n_shared_experts", low=0, high=64, default=1),
        num_groups=fields.integer("n_group", low=1, high=count, default=usual_groups[0]),
        num_groups_per_token=fields.integer(
            "topk_group", low=1, high=MAX_EXPERTS, default=usual_groups[1]
        ),
        scaling_factor=fields.number("routed_scaling_factor", low=1e-6, high=1e6),
        score_function="sigmoid",
        has_bias=True,
    )


def sigmoid_moe(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    """List the tensors of a layer with experts, without the routed ones."""
    specs = parts.router(config, prefix)
    bias = prefix + "mlp.gate.e_score_correction_bias"
    specs.append(parts.vector(bias, config.moe.num_experts))
    if config.moe.shared_size:
        shared = prefix + "mlp.shared_experts."
        specs += parts.mlp(shared, config.moe.shared_size, config.hidden_size)
    return specs


def absent_shared(config: ModelConfig) -> tuple[str, ...]:
    """List names of shared experts that contradict the config."""
    prefixes = [f"model.layers.{layer}." for layer in config.moe_layers]
    if config.moe.shared_size:
        return ()
    return tuple(f"{prefix}mlp.shared_experts.gate_proj.weight" for prefix in prefixes)


def gguf_sigmoid_experts(keys: GgufKeys, default_norm: bool) -> Config:
    """Convert the metadata of the experts.

    default_norm: whether weights are normalised if the file does not say.
    """
    norm_topk_prob = keys.get("expert_weights_norm")
    return {
        "n_shared_experts": keys.integer("expert_shared_count", default=1),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", default=0),
        "norm_topk_prob": default_norm if norm_topk_prob is None else norm_topk_prob,
        "routed_scaling_factor": keys.get("expert_weights_scale") or 1.0,
        "n_group": keys.get("expert_group_count") or 1,
        "topk_group": keys.get("expert_group_used_count") or 1,
    }
