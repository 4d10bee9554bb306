"""MiniMax-M2 in GGUF files."""

from __future__ import annotations

from lowtide.families.gguf import QK_NORMS, USUAL, Config, GgufArchitecture, GgufKeys, usual_config
from lowtide.families.sigmoid_experts import SIGMOID

_MOE = "model.layers.#.block_sparse_moe."


def _config(keys: GgufKeys) -> Config:
    keys.only("expert_gating_func", 0, SIGMOID)  # 0: as usual
    keys.only("expert_weights_scale", 0.0, 1.0)
    return usual_config(keys, "MiniMaxM2ForCausalLM", "intermediate_size")


GGUF = GgufArchitecture(
    name="minimax-m2",
    config=_config,
    names={
        **USUAL,
        **QK_NORMS,
        "blk.#.ffn_gate_inp.weight": _MOE + "gate.weight",
        "blk.#.exp_probs_b.bias": _MOE + "e_score_correction_bias",
    },
)
