"""Qwen3-Next and Qwen3.5 in GGUF files, as llama.cpp's converter writes transformers' models."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from family_models import FAMILIES, randomise
from gguf.constants import GGMLQuantizationType as Type
from gguf_files import finish, packed
from torch import Tensor

Choose = Callable[[str, tuple[int, ...]], Type]

NAMES = {"qwen3_5_moe": "qwen35moe", "qwen3_5": "qwen35", "qwen3_next": "qwen3next"}
PARTS = ("gate", "up", "down")
LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_qkvz.weight": "ssm_in.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    **{f"mlp.shared_expert.{x}_proj.weight": f"ffn_{x}_shexp.weight" for x in PARTS},
    **{f"mlp.{x}_proj.weight": f"ffn_{x}.weight" for x in PARTS},
}
ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def all_f32(name: str, shape: tuple[int, ...]) -> Type:
    return Type.F32


def write_hybrid(
    path: Path,
    family: str,
    model: torch.nn.Module,
    choose: Choose = all_f32,
    *,
    is_merged: bool = False,
    is_old: bool = False,
    num_predicting: int = 0,
    has_flags: bool = False,
    tokens: int = 0,
) -> None:
    """Write a model of transformers.

    is_merged: gate's and up's experts are one tensor. is_old: as the first files of Qwen3-Next.
    num_predicting: layers behind the last that predict further tokens. has_flags: an array says
    which layers are recurrent. tokens: a vocabulary of as many.
    """
    writer = gguf.GGUFWriter(path, NAMES[family])
    _add_metadata(writer, NAMES[family], model.config, num_predicting, has_flags)
    if tokens:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen35")
        words = ["t", "0", "1", *(f"t{i}" for i in range(tokens - 3))]
        writer.add_token_list([word.encode() for word in words])
        writer.add_token_types([1] * tokens)
        writer.add_token_merges(["t 0", "t 1"])
    for number, (name, weights) in enumerate(tensors_of(family, model, is_merged, is_old)):
        is_matrix = weights.dim() > 1 and "conv1d" not in name
        kind = choose(name, tuple(weights.shape)) if is_matrix else Type.F32
        data = packed(weights.float().contiguous().numpy(), kind, number)
        writer.add_tensor(name, data, raw_dtype=kind)
    for layer in range(num_predicting):
        name = f"blk.{model.config.num_hidden_layers + layer}.nextn.eh_proj.weight"
        writer.add_tensor(name, torch.zeros(4, 8).numpy())
    finish(writer)


def random_model(family: str, seed: int, **changes: Any) -> torch.nn.Module:
    """In float32, with layers at an interval, as files have them."""
    rng, row = random.Random(f"{family} {seed}"), FAMILIES[family]
    torch.manual_seed(seed)
    values = {**row.values(rng), "layer_types": ["linear_attention", "full_attention"] * 2}
    values |= {"mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True, **changes}
    values["rope_parameters"] |= {"rope_type": "default"}
    model = row.model_class(row.config_class(**values))
    randomise(model)
    return model.float().eval()


def _add_metadata(
    writer: gguf.GGUFWriter, name: str, config: Any, num_predicting: int, has_flags: bool
) -> None:
    num_layers, rope = config.num_hidden_layers, config.rope_parameters
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(num_layers + num_predicting)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(config.head_dim * rope["partial_rotary_factor"]))
    writer.add_array(f"{name}.rope.dimension_sections", [11, 11, 10, 0])
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    if num_predicting:
        writer.add_nextn_predict_layers(num_predicting)
    flags = [kind == "linear_attention" for kind in config.layer_types]
    if has_flags:
        writer.add_array(f"{name}.attention.recurrent_layers", flags + [False] * num_predicting)
    interval = flags.index(False) + 1
    writer.add_uint32(f"{name}.full_attention_interval", interval)
    if name == "qwen35":
        writer.add_feed_forward_length(config.intermediate_size)
        return
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def tensors_of(
    family: str, model: torch.nn.Module, is_merged: bool, is_old: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield a file's tensors by name."""
    config = model.config
    for name, parameter in model.named_parameters():
        weights = parameter.detach()
        if name.endswith("norm.weight") and "linear_attn" not in name:
            weights = weights + 1
        if name in ENDS:
            yield ENDS[name], weights
            continue
        _, _, number, own = name.split(".", 3)
        block = f"blk.{number}."
        if own.endswith("experts.gate_up_proj"):
            if is_merged:
                yield block + "ffn_gate_up_exps.weight", weights
            else:
                for part, half in zip(("gate", "up"), weights.chunk(2, dim=1), strict=True):
                    yield block + f"ffn_{part}_exps.weight", half
        elif own.endswith("experts.down_proj"):
            yield block + "ffn_down_exps.weight", weights
        elif own.endswith("in_proj_qkvz.weight") and not is_old:
            mixed, gates = _split(weights, config)
            yield block + "attn_qkv.weight", mixed
            yield block + "attn_gate.weight", gates
        else:
            yield block + LAYER[own], _stored(family, own, weights, config)


def _split(weights: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """Take apart the rows of each key head."""
    key, each = config.linear_key_head_dim, config.linear_num_value_heads
    each = each // config.linear_num_key_heads * config.linear_value_head_dim
    by_head = weights.view(config.linear_num_key_heads, -1, weights.shape[1])
    query, keys, values, gates = (
        part.flatten(0, 1) for part in by_head.split([key, key, each, each], dim=1)
    )
    return torch.cat([query, keys, values]), gates


def _stored(family: str, name: str, weights: Tensor, config: Any) -> Tensor:
    part = name.removeprefix("linear_attn.")
    if part == "A_log":
        weights = -weights.exp()
    if part == "conv1d.weight":
        weights = weights.squeeze(1)
    if name == "mlp.shared_expert_gate.weight":
        weights = weights.squeeze(0)
    if family == "qwen3_next" or part == name or part == "norm.weight":
        return weights
    if part == "out_proj.weight":
        return _tiled(weights.T, config.linear_value_head_dim, config).T
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        num_fixed = 2 * config.linear_num_key_heads * config.linear_key_head_dim
        values = _tiled(weights[num_fixed:], config.linear_value_head_dim, config)
        return torch.cat([weights[:num_fixed], values])
    width = config.linear_value_head_dim if part == "in_proj_z.weight" else 1
    return _tiled(weights, width, config)


def _tiled(weights: Tensor, width: int, config: Any) -> Tensor:
    """Order value heads by their number within a key head, then by key heads."""
    by_head = weights.reshape(config.linear_num_key_heads, -1, width, *weights.shape[1:])
    return by_head.transpose(0, 1).reshape(weights.shape)
