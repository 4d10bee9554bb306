"""LFM2 with experts in GGUF files."""

from __future__ import annotations

from lowtide.families.gguf import Config, GgufArchitecture, GgufKeys, usual_config
from lowtide.families.lfm2.gguf import LAYER, NAMES, mixer_config
from lowtide.families.sigmoid_experts import SIGMOID


def _config(keys: GgufKeys) -> Config:
    keys.only("expert_gating_func", SIGMOID)
    return {
        **usual_config(keys, "Lfm2MoeForCausalLM", attends_everywhere=False),
        **mixer_config(keys),
        "intermediate_size": keys.even("feed_forward_length", may_lack=True),
        "num_dense_layers": keys.integer("leading_dense_block_count", default=0),
        "norm_topk_prob": True,  # whatever the file says, as in llama.cpp
        "routed_scaling_factor": keys.get("expert_weights_scale") or 1.0,
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in keys.shapes),
    }


GGUF = GgufArchitecture(
    name="lfm2moe",
    config=_config,
    names={
        **NAMES,
        **{
            f"blk.#.ffn_{part}_exps.weight": f"{LAYER}feed_forward.experts.{part}_proj"
            for part in ("gate", "up", "gate_up", "down")
        },
        "blk.#.ffn_gate_inp.weight": f"{LAYER}feed_forward.gate.weight",
        "blk.#.exp_probs_b.bias": f"{LAYER}feed_forward.expert_bias",
    },
)
