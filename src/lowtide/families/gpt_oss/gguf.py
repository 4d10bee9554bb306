"""gpt-oss in GGUF files, where gate and up are separate tensors."""

from __future__ import annotations

from lowtide.config.fields import MAX_LAYERS
from lowtide.families.gguf import (
    ENDS,
    EXPERTS,
    OUTPUT,
    QKV,
    QKV_BIASES,
    Config,
    GgufArchitecture,
    GgufKeys,
    usual_config,
)
from lowtide.model_folder.gguf_header import GgufArray

_LAYER = "model.layers.#."
_PATTERN = "attention.sliding_window_pattern"


def _config(keys: GgufKeys) -> Config:
    config = usual_config(keys, "GptOssForCausalLM", "intermediate_size")
    scaling = config.get("rope_scaling", {"rope_type": "default"})
    if isinstance(scaling, dict) and scaling.get("rope_type") == "yarn":
        scaling["truncate"] = False  # as published; files do not say
    return {
        **config,
        "rope_scaling": scaling,
        "sliding_window": keys.need("attention.sliding_window"),
        **_layer_types(keys),
    }


def _layer_types(keys: GgufKeys) -> Config:
    """Read the layers with a sliding window, if the file lists them.

    They are given as a period, whose last layer has none, or layer by layer.
    """
    keys.only("rope.freq_base_swa", keys.get("rope.freq_base"))
    pattern = keys.get(_PATTERN)
    if pattern is None:
        return {}
    if isinstance(pattern, GgufArray):
        if pattern.num_elements > MAX_LAYERS:  # before a list is made of it
            raise keys.error(_PATTERN, f"is of more than {MAX_LAYERS} layers")
        flags = [bool(each) for each in pattern.numbers()]
    else:
        period = keys.integer_within(_PATTERN, 0, 2**32 - 1)
        layers = range(keys.integer_within("block_count", 1, MAX_LAYERS))
        flags = [period == 0 or layer % period < period - 1 for layer in layers]
    kinds = {True: "sliding_attention", False: "full_attention"}
    return {"layer_types": [kinds[flag] for flag in flags]}


GGUF = GgufArchitecture(
    name="gpt-oss",
    config=_config,
    names={
        **ENDS,
        **QKV,
        **QKV_BIASES,
        **OUTPUT,
        **EXPERTS,
        # Not `gate_up_proj`, whose rows (unpacked: columns) are interleaved.
        "blk.#.ffn_gate_up_exps.weight": _LAYER + "mlp.experts.gate_then_up_proj",
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
