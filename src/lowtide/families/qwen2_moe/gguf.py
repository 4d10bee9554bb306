"""Qwen2-MoE in GGUF files."""

from __future__ import annotations

from lowtide.families.gguf import (
    QKV_BIASES,
    USUAL,
    Config,
    GgufArchitecture,
    GgufKeys,
    RearrangedTensor,
    has_qkv_bias,
    mlp,
    shared_width,
    usual_config,
)
from lowtide.model_folder.checkpoint import ArrayView


def _config(keys: GgufKeys) -> Config:
    return {
        **usual_config(keys, "Qwen2MoeForCausalLM"),
        "shared_expert_intermediate_size": shared_width(keys),
        "norm_topk_prob": False,
        "qkv_bias": has_qkv_bias(keys),
    }


GGUF = GgufArchitecture(
    name="qwen2moe",
    config=_config,
    names={
        **USUAL,
        **QKV_BIASES,
        **mlp("_shexp", "mlp.shared_expert."),
        # A vector in some files.
        "blk.#.ffn_gate_inp_shexp.weight": RearrangedTensor(
            "model.layers.#.mlp.shared_expert_gate.weight",
            lambda config: ArrayView((1, config.hidden_size), order=(0, 1)),
        ),
    },
)
