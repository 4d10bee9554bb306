"""Qwen3-Next in GGUF files, whose last layer (MTP), if any, is dropped."""

from __future__ import annotations

from lowtide.families.gguf import Config, GgufArchitecture, GgufKeys, shared_width, usual_config
from lowtide.families.qwen_hybrid import GGUF_EXPERT_NAMES, GGUF_NAMES, gguf_layers

SPLIT_KEY = "lowtide_projections_are_split"
"""Key by which a file's metadata say that `in_proj_qkvz` is two matrices."""

_DELTA = "model.layers.#.linear_attn."


def _config(keys: GgufKeys) -> Config:
    return {
        **usual_config(keys, "Qwen3NextForCausalLM"),
        **gguf_layers(keys, is_tiled=False),
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": shared_width(keys),
        # The first files have one matrix, as safetensors have.
        SPLIT_KEY: not any(name.endswith(".ssm_in.weight") for name in keys.shapes),
    }


GGUF = GgufArchitecture(
    name="qwen3next",
    config=_config,
    names={
        **GGUF_NAMES,
        **GGUF_EXPERT_NAMES,
        "blk.#.ssm_in.weight": _DELTA + "in_proj_qkvz.weight",
        "blk.#.ssm_ba.weight": _DELTA + "in_proj_ba.weight",
    },
)
