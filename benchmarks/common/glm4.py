"""LLaDA2 checkpoints in transformers' `Glm4MoeForCausalLM`.

transformers has no LLaDA2, but the two bodies are the same function: fused against split QKV and a
block-causal mask instead of a causal one are all that differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Glm4MoeConfig

_RENAMED = (
    ("word_embeddings", "embed_tokens"),
    ("attention.dense", "self_attn.o_proj"),
    ("attention.query_layernorm", "self_attn.q_norm"),
    ("attention.key_layernorm", "self_attn.k_norm"),
    ("gate.expert_bias", "gate.e_score_correction_bias"),
)

_SAME_FIELDS = (
    "vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers "
    "num_attention_heads num_key_value_heads head_dim rms_norm_eps num_experts_per_tok n_group "
    "topk_group first_k_dense_replace norm_topk_prob routed_scaling_factor "
    "max_position_embeddings tie_word_embeddings"
).split()


def glm4_config(config: Mapping[str, Any], **more: Any) -> Glm4MoeConfig:
    """Make a config from LLaDA2's `config.json` values; `more` are fields of the result."""
    return Glm4MoeConfig(
        **{name: config[name] for name in _SAME_FIELDS},
        **more,
        n_routed_experts=config["num_experts"],
        n_shared_experts=config["num_shared_experts"],
        use_qk_norm=config.get("use_qk_norm", True),
        attention_bias=False,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(config["rope_theta"]),
            "partial_rotary_factor": config["partial_rotary_factor"],
        },
    )


def glm4_tensors(
    name: str, tensor: Tensor, config: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """One of LLaDA2's tensors under Glm4Moe's names; experts stay single."""
    heads = [config["num_attention_heads"]] + 2 * [config["num_key_value_heads"]]
    sizes = [num_heads * config["head_dim"] for num_heads in heads]
    prefix, fused, rest = name.partition("attention.query_key_value")
    if fused:
        for part, rows in zip("qkv", tensor.split(sizes), strict=True):
            yield f"{prefix}self_attn.{part}_proj{rest}", rows.contiguous()
    else:
        for theirs, ours in _RENAMED:
            name = name.replace(theirs, ours)
        # The selection bias is kept in float32 whatever the model's type.
        yield name, tensor.float() if name.endswith("_bias") else tensor


def block_causal_mask(first: int, stop: int, block_length: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [1, 1, stop - first, stop]: rows `first` to `stop` over positions to `stop`."""
    blocks = torch.arange(stop) // block_length
    is_hidden = blocks[None, :] > blocks[first:, None]
    mask = torch.zeros(stop - first, stop, dtype=dtype)
    return mask.masked_fill_(is_hidden, torch.finfo(dtype).min)[None, None]
