"""Independent bidirectional model for tests: transformers' classes with a mask that hides nothing.

Goldens of LLaDA, LLaDA-MoE and Dream come from its Llama, Qwen3-MoE and Qwen2.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import torch
from oracle import GOLDENS
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)


def golden_cases(name: str) -> list[dict[str, Any]]:
    return json.loads((GOLDENS / name / "generate.json").read_text())["cases"]


@functools.cache
def load_full(name: str) -> PreTrainedModel:
    """The golden of this name, float32."""
    config = json.loads((GOLDENS / name / "config.json").read_text())
    weights = load_file(GOLDENS / name / "model.safetensors")
    model, state = {"llada-a": _llada, "llada-moe-a": _llada_moe, "dream-a": _dream}[name](
        config, weights
    )
    model.load_state_dict(state)
    return model.eval()


def _llada(config: dict[str, Any], weights: dict[str, Tensor]) -> tuple[PreTrainedModel, dict]:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config["vocab_size"],
            hidden_size=config["d_model"],
            intermediate_size=config["mlp_hidden_size"],
            num_hidden_layers=config["n_layers"],
            num_attention_heads=config["n_heads"],
            num_key_value_heads=config["n_kv_heads"],
            rms_norm_eps=config["rms_norm_eps"],
            rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
        )
    )
    return model, {_llama_name(name): tensor for name, tensor in weights.items()}


def _llama_name(name: str) -> str:
    name = name.removeprefix("model.transformer.")
    for theirs, ours in (
        (r"^wte\.", "model.embed_tokens."),
        (r"^ln_f\.", "model.norm."),
        (r"^ff_out\.", "lm_head."),
        (r"^blocks\.", "model.layers."),
        (r"attn_norm", "input_layernorm"),
        (r"ff_norm", "post_attention_layernorm"),
        (r"attn_out", "self_attn.o_proj"),
        (r"(\.\d+)\.([qkv]_proj)", r"\1.self_attn.\2"),
        (r"ff_proj", "mlp.gate_proj"),
        (r"(\.\d+)\.up_proj", r"\1.mlp.up_proj"),
        (r"(\.\d+)\.ff_out", r"\1.mlp.down_proj"),
    ):
        name = re.sub(theirs, ours, name)
    return name


_SAME = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads rms_norm_eps"
).split()


def _dream(config: dict[str, Any], weights: dict[str, Tensor]) -> tuple[PreTrainedModel, dict]:
    same = {name: config[name] for name in [*_SAME, "intermediate_size"]}
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    return Qwen2ForCausalLM(Qwen2Config(**same, rope_parameters=rope)), weights


def _llada_moe(config: dict[str, Any], weights: dict[str, Tensor]) -> tuple[PreTrainedModel, dict]:
    same = {name: config[name] for name in [*_SAME, "num_experts", "num_experts_per_tok"]}
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **same,
            head_dim=config["hidden_size"] // config["num_attention_heads"],
            moe_intermediate_size=config["expert_intermediate_size"],
            norm_topk_prob=False,
            rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
        )
    )
    state = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack(
                [
                    weights[f"{prefix}{expert}.{projection}_proj.weight"]
                    for expert in range(config["num_experts"])
                ]
            )
            for projection in ("gate", "up", "down")
        )
        state[prefix + "gate_up_proj"] = torch.cat([gate, up], dim=1)
        state[prefix + "down_proj"] = down
    return model, state
