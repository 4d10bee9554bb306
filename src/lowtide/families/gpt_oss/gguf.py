"""gpt-oss in GGUF files, where gate and up are tensors of their own."""

from __future__ import annotations

from lowtide.families.gguf import (
    ENDS,
    EXPERTS,
    OUTPUT,
    QKV,
    QKV_BIASES,
    Config,
    GgufArchitecture,
    GgufKeys,
    expert_config,
    expert_width,
    usual_config,
)

_LAYER = "model.layers.#."


def _config(keys: GgufKeys) -> Config:
    config = usual_config(keys, "GptOssForCausalLM")
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict):
        scaling["truncate"] = False  # as published; files do not say
    return {
        **config,
        **expert_config(keys),
        "intermediate_size": expert_width(keys),
        "sliding_window": keys.need("attention.sliding_window"),
    }


GGUF = GgufArchitecture(
    name="gpt-oss",
    config=_config,
    names={
        **ENDS,
        **QKV,
        **QKV_BIASES,
        **OUTPUT,
        **EXPERTS,
        "blk.#.attn_norm.weight": _LAYER + "input_layernorm.weight",
        "blk.#.post_attention_norm.weight": _LAYER + "post_attention_layernorm.weight",
        "blk.#.attn_output.bias": _LAYER + "self_attn.o_proj.bias",
        "blk.#.attn_sinks.weight": _LAYER + "self_attn.sinks",
        "blk.#.ffn_gate_inp.weight": _LAYER + "mlp.router.weight",
        "blk.#.ffn_gate_inp.bias": _LAYER + "mlp.router.bias",
        "blk.#.ffn_gate_exps.bias": _LAYER + "mlp.experts.gate_proj_bias",
        "blk.#.ffn_up_exps.bias": _LAYER + "mlp.experts.up_proj_bias",
        "blk.#.ffn_down_exps.bias": _LAYER + "mlp.experts.down_proj_bias",
    },
)
