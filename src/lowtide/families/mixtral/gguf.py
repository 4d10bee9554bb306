"""Mixtral in GGUF files: "llama" with experts, which are separate tensors in the oldest files."""

from __future__ import annotations

from lowtide.families.gguf import (
    ROPE_DIVISORS,
    TURNED_QK,
    USUAL,
    Config,
    GgufArchitecture,
    GgufKeys,
    usual_config,
)

_LAYER = "model.layers.#."


def _config(keys: GgufKeys) -> Config:
    keys.only("attention.sliding_window", 0)
    keys.only("attention.scale", 0.0)
    return usual_config(keys, "MixtralForCausalLM", "intermediate_size")


GGUF = GgufArchitecture(
    name="llama",
    config=_config,
    suits=lambda keys: bool(keys.get("expert_count")),
    names={
        **USUAL,
        **{name: ours for name, ours in TURNED_QK.items() if name.endswith("weight")},
        ROPE_DIVISORS: ROPE_DIVISORS,  # read with the metadata
        "blk.#.ffn_gate_inp.weight": _LAYER + "block_sparse_moe.gate.weight",
        "blk.#.ffn_gate.#.weight": _LAYER + "block_sparse_moe.experts.#.w1.weight",
        "blk.#.ffn_up.#.weight": _LAYER + "block_sparse_moe.experts.#.w3.weight",
        "blk.#.ffn_down.#.weight": _LAYER + "block_sparse_moe.experts.#.w2.weight",
    },
)
