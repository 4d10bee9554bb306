"""transformers' classes that are the same functions as LLaDA, LLaDA-MoE and Dream, unmasked.

LLaDA is a Llama, Dream a Qwen2 and LLaDA-MoE a Qwen3-MoE, in which every position sees all: no
mask is made (`config.is_causal`), and the attention is told so too, because without a mask its
modules take their own word for it. Of LLaDA in bfloat16 the rotation is rounded elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from common.official import Weights
from lowtide.config import ModelConfig

_LLAMA_NAMES = (
    (r"^model\.transformer\.wte\.", "model.embed_tokens."),
    (r"^model\.transformer\.ln_f\.", "model.norm."),
    (r"^model\.transformer\.ff_out\.", "lm_head."),
    (r"^model\.transformer\.blocks\.", "model.layers."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ff_norm\.", ".post_attention_layernorm."),
    (r"\.attn_out\.", ".self_attn.o_proj."),
    (r"\.([qkv]_proj)\.", r".self_attn.\1."),
    (r"\.ff_proj\.", ".mlp.gate_proj."),
    (r"\.up_proj\.", ".mlp.up_proj."),
    (r"(\.\d+)\.ff_out\.", r"\1.mlp.down_proj."),
)


def stack_experts(config: ModelConfig, weights: Weights) -> None:
    """Put each layer's experts into the two tensors that transformers has, by its names.

    One holds gate and up, one holds down. The tensors of single experts become views of them.
    """
    for layer in range(config.num_layers if config.experts is not None else 0):
        prefix = f"model.layers.{layer}.mlp.experts."
        if f"{prefix}down_proj" in weights:
            continue
        names = [
            [f"{prefix}{expert}.{part}_proj.weight" for part in ("gate", "up", "down")]
            for expert in range(config.moe.num_experts)
        ]
        both = torch.stack([torch.cat([weights[gate], weights[up]]) for gate, up, _ in names])
        down = torch.stack([weights[name] for *_, name in names])
        for expert, (gate, up, own_down) in enumerate(names):
            weights[gate], weights[up] = both[expert].chunk(2)
            weights[own_down] = down[expert]
        weights |= {f"{prefix}gate_up_proj": both, f"{prefix}down_proj": down}


def open_peer(config: ModelConfig, weights: Weights) -> PreTrainedModel:
    """The model over these very weights, without copies but of experts: see `stack_experts`."""
    stack_experts(config, weights)
    model_class, peer_config = _peer_config(config)
    peer_config.is_causal = False
    peer_config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = model_class(peer_config)
    state = {_peer_name(config, name): weight for name, weight in weights.items()}
    wanted = model.state_dict().keys()  # fewer than there are where layers are left out
    model.load_state_dict({name: state[name] for name in wanted}, assign=True)
    # Its frequencies are no weights, and were made of nothing.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=peer_config)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    return model.eval()


def _peer_name(config: ModelConfig, name: str) -> str:
    if config.family == "llada":
        # A layer's `ff_out` is renamed before the head's would be.
        for theirs, ours in reversed(_LLAMA_NAMES):
            name = re.sub(theirs, ours, name)
    return name


def _peer_config(config: ModelConfig) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    spec = config.attention
    common: Mapping[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": False,
        "dtype": config.dtype,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope.theta},
    }
    if config.family == "llada":
        return LlamaForCausalLM, LlamaConfig(**common, intermediate_size=config.dense_size)
    if config.family == "dream":
        return Qwen2ForCausalLM, Qwen2Config(**common, intermediate_size=config.dense_size)
    experts = {
        "head_dim": spec.head_dim,
        "num_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.num_experts_per_token,
        "moe_intermediate_size": config.moe.expert_size,
        "norm_topk_prob": False,
    }
    return Qwen3MoeForCausalLM, Qwen3MoeConfig(**common, **experts)
