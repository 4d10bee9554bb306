"""LFM2 in GGUF files, where a layer without key heads is one without attention."""

from __future__ import annotations

from lowtide.config import ModelConfig, ShortConvSpec
from lowtide.families.gguf import (
    QKV,
    Config,
    GgufArchitecture,
    GgufKeys,
    Names,
    RearrangedTensor,
    dense_config,
)
from lowtide.model_folder.checkpoint import ArrayView

LAYER = "model.layers.#."


def mixer_config(keys: GgufKeys) -> Config:
    """Convert the metadata of convolutions and of attention."""
    keys.only("attention.sliding_window", 0)
    heads = keys.of_layers("attention.head_count_kv")
    return {
        "layer_types": ["full_attention" if each else "conv" for each in heads],
        "norm_eps": keys.need("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": keys.need("shortconv.l_cache"),
        "conv_bias": any(name.endswith(".shortconv.in_proj.bias") for name in keys.shapes),
    }


def _config(keys: GgufKeys) -> Config:
    return {
        **dense_config(keys, "Lfm2ForCausalLM", attends_everywhere=False),
        **mixer_config(keys),
        "block_auto_adjust_ff_dim": False,  # it is the final width
    }


def _kernel(config: ModelConfig) -> ArrayView:
    kernel = config.mixer(ShortConvSpec).kernel
    return ArrayView((config.hidden_size, 1, kernel), order=(0, 1, 2))


_PROJECTIONS = [f"{name}.{kind}" for name in ("in_proj", "out_proj") for kind in ("weight", "bias")]

NAMES: Names = {
    "token_embd.weight": "model.embed_tokens.weight",
    "token_embd_norm.weight": "model.embedding_norm.weight",  # before the head, for all its name
    "output.weight": "lm_head.weight",
    "blk.#.attn_norm.weight": f"{LAYER}operator_norm.weight",
    "blk.#.ffn_norm.weight": f"{LAYER}ffn_norm.weight",
    **QKV,
    **{f"blk.#.attn_{x}_norm.weight": f"{LAYER}self_attn.{x}_layernorm.weight" for x in "qk"},
    "blk.#.attn_output.weight": f"{LAYER}self_attn.out_proj.weight",
    **{f"blk.#.shortconv.{name}": f"{LAYER}conv.{name}" for name in _PROJECTIONS},
    "blk.#.shortconv.conv.weight": RearrangedTensor(f"{LAYER}conv.conv.weight", _kernel),
    "blk.#.shortconv.conv.bias": f"{LAYER}conv.conv.bias",
    "blk.#.ffn_gate.weight": f"{LAYER}feed_forward.w1.weight",
    "blk.#.ffn_up.weight": f"{LAYER}feed_forward.w3.weight",
    "blk.#.ffn_down.weight": f"{LAYER}feed_forward.w2.weight",
}

GGUF = GgufArchitecture(name="lfm2", config=_config, names=NAMES)
