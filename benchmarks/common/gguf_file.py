"""Writes a Qwen3-MoE checkpoint as GGUF, with the same bytes, for llama.cpp.

Norms and routers are float32 there, everything else stays bfloat16. There is no vocabulary in the
file: prompts are token ids. Needs the `gguf` package.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

_OF_A_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
}
_OTHERS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write_gguf(source: Path, target: Path) -> Path:
    """The checkpoint in `source` as the file `target`, once. Raises ImportError without `gguf`."""
    import gguf

    if target.exists():
        return target
    config = json.loads((source / "config.json").read_text())
    partial = target.with_suffix(".part")
    target.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(partial, "qwen3moe")
    _write_settings(writer, config)
    for name, tensor in _tensors(source, config):
        if tensor.dtype == torch.bfloat16:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(name, _bytes_of(tensor), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, target)
    return target


def _write_settings(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def _tensors(source: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Tensors under llama.cpp's names; a layer's experts are stacked."""
    [shard] = source.glob("*.safetensors")
    with safe_open(shard, framework="pt") as file:
        for theirs, ours in _OTHERS.items():
            yield f"{ours}.weight", _widened(file.get_tensor(f"{theirs}.weight"))
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            for theirs, ours in _OF_A_LAYER.items():
                tensor = file.get_tensor(f"{prefix}{theirs}.weight")
                is_router = ours == "ffn_gate_inp"
                yield (
                    f"blk.{layer}.{ours}.weight",
                    tensor.float() if is_router else _widened(tensor),
                )
            for part in ("gate", "up", "down"):
                names = [
                    f"{prefix}mlp.experts.{expert}.{part}_proj.weight"
                    for expert in range(config["num_experts"])
                ]
                stacked = torch.stack([file.get_tensor(name) for name in names])
                yield f"blk.{layer}.ffn_{part}_exps.weight", stacked


def _widened(tensor: Tensor) -> Tensor:
    """Vectors (norms) in float32, as llama.cpp wants them."""
    return tensor.float() if tensor.dim() == 1 else tensor


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """The last dimension counts bytes."""
    return tensor.contiguous().view(torch.uint8).numpy()
