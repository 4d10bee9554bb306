"""An independent model for tests: LLaDA2 checkpoints in transformers' `Glm4MoeForCausalLM`.

The two bodies are the same function: fused against split QKV, stacked against single experts, and
a block-causal mask instead of a causal one are all that differs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache, Glm4MoeConfig, Glm4MoeForCausalLM

from lowtide.layers.batch import Batch, KVRange, Segment

GOLDENS = Path(__file__).parent / "goldens"


def load_oracle(folder: Path, dtype: torch.dtype = torch.float32) -> Glm4MoeForCausalLM:
    """The model of a LLaDA2 checkpoint folder with one `model.safetensors`."""
    config = json.loads((folder / "config.json").read_text())
    return make_oracle(config, load_file(folder / "model.safetensors"), dtype)


def make_oracle(
    config: Mapping[str, Any], weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32
) -> Glm4MoeForCausalLM:
    """The model of LLaDA2.0/2.1's `config.json` values and tensors by name."""
    model = Glm4MoeForCausalLM(oracle_config(config)).to(dtype)
    # The selection bias stays in float32, as the router's arithmetic.
    state = {name: tensor.float() for name, tensor in oracle_weights(config, weights).items()}
    model.load_state_dict(state)
    return model.eval()


def oracle_config(config: Mapping[str, Any]) -> Glm4MoeConfig:
    """`Glm4MoeConfig` from LLaDA2's `config.json` values."""
    same = (
        "vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers "
        "num_attention_heads num_key_value_heads head_dim rms_norm_eps num_experts_per_tok "
        "n_group topk_group first_k_dense_replace norm_topk_prob routed_scaling_factor "
        "max_position_embeddings tie_word_embeddings"
    ).split()
    return Glm4MoeConfig(
        **{name: config[name] for name in same},
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


def oracle_weights(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """LLaDA2's tensors under `Glm4Moe`'s names and in its shapes."""
    heads = [config["num_attention_heads"]] + 2 * [config["num_key_value_heads"]]
    sizes = [count * config["head_dim"] for count in heads]
    renamed = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in weights.items():
        if name.endswith("query_key_value.weight"):
            prefix = name.replace("attention.query_key_value.weight", "self_attn.")
            for part, rows in zip("qkv", tensor.split(sizes), strict=True):
                renamed[f"{prefix}{part}_proj.weight"] = rows
        elif ".mlp.experts." in name:
            prefix, rest = name.split("experts.")
            expert, projection, _ = rest.split(".")
            experts.setdefault(f"{prefix}experts.{projection}", {})[int(expert)] = tensor
        else:
            renamed[_renamed(name)] = tensor
    stacked = {
        name: torch.stack([by_id[expert] for expert in sorted(by_id)])
        for name, by_id in experts.items()
    }
    for name in [name for name in stacked if name.endswith("gate_proj")]:
        up = stacked[name.replace("gate_proj", "up_proj")]
        joined = name.replace("gate_proj", "gate_up_proj")
        renamed[joined] = torch.cat([stacked[name], up], dim=1)  # [experts, 2 * width, hidden]
        down = name.replace("gate_proj", "down_proj")
        renamed[down] = stacked[down]
    return renamed


def block_causal_mask(first: int, stop: int, block_length: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [1, 1, stop - first, stop]: rows `first` to `stop` over positions to `stop`."""
    blocks = torch.arange(stop) // block_length
    is_hidden = blocks[None, :] > blocks[first:, None]
    mask = torch.zeros(stop - first, stop, dtype=dtype)
    return mask.masked_fill_(is_hidden, torch.finfo(dtype).min)[None, None]


class OracleModel:
    """The oracle as the decoder's model, with a cache of its own for each KV range."""

    def __init__(self, oracle: Glm4MoeForCausalLM) -> None:
        self._oracle = oracle
        self._caches: dict[KVRange, DynamicCache] = {}

    def forward(self, batch: Batch) -> Tensor:
        return torch.cat([self._segment(batch, segment) for segment in batch.segments])

    def mixes_rows(self, hidden: Tensor) -> bool:
        return True

    def logits(self, hidden: Tensor) -> Tensor:
        return self._oracle.lm_head(hidden).float()

    def _segment(self, batch: Batch, segment: Segment) -> Tensor:
        """Final hidden states [rows, hidden] of one sequence's rows."""
        first, stop = segment.first_position, segment.end_position
        if first == 0:
            self._caches[segment.kv] = DynamicCache()
        cache = self._caches[segment.kv]
        if cache.get_seq_length() > first:
            cache.crop(first - cache.get_seq_length())  # negative: how many to remove
        rows = slice(segment.start, segment.stop)
        mask = block_causal_mask(first, stop, segment.block_length, self._oracle.dtype)
        return self._oracle.model(
            input_ids=batch.token_ids[None, rows],
            position_ids=batch.positions[None, rows],
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[0]


def _renamed(name: str) -> str:
    for theirs, ours in (
        ("word_embeddings", "embed_tokens"),
        ("attention.dense", "self_attn.o_proj"),
        ("attention.query_layernorm", "self_attn.q_norm"),
        ("attention.key_layernorm", "self_attn.k_norm"),
        ("gate.expert_bias", "gate.e_score_correction_bias"),
    ):
        name = name.replace(theirs, ours)
    return name
