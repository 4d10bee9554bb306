"""Mixtral in GGUF files: "llama" with experts, which are separate tensors in the oldest files."""

from __future__ import annotations

from lowtide.families.gguf import (
    ROPE_DIVISORS,
    USUAL,
    Config,
    GgufArchitecture,
    GgufKeys,
    RearrangedTensor,
    halves_in_turn,
    usual_config,
)

_LAYER = "model.layers.#."


def _config(keys: GgufKeys) -> Config:
    if not keys.get("expert_count"):
        keys.refuse("llama")
    keys.only("attention.sliding_window", 0)
    return {
        **usual_config(keys, "MixtralForCausalLM", "intermediate_size"),
    }


GGUF = GgufArchitecture(
    name="llama",
    config=_config,
    names={
        **USUAL,
        ROPE_DIVISORS: ROPE_DIVISORS,  # read with the metadata
        "blk.#.attn_q.weight": RearrangedTensor(
            _LAYER + "self_attn.q_proj.weight",
            halves_in_turn(lambda config: config.attention.num_heads),
        ),
        "blk.#.attn_k.weight": RearrangedTensor(
            _LAYER + "self_attn.k_proj.weight",
            halves_in_turn(lambda config: config.attention.num_kv_heads),
        ),
        "blk.#.ffn_gate_inp.weight": _LAYER + "block_sparse_moe.gate.weight",
        "blk.#.ffn_gate.#.weight": _LAYER + "block_sparse_moe.experts.#.w1.weight",
        "blk.#.ffn_up.#.weight": _LAYER + "block_sparse_moe.experts.#.w3.weight",
        "blk.#.ffn_down.#.weight": _LAYER + "block_sparse_moe.experts.#.w2.weight",
    },
)
