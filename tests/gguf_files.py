"""GGUF files of tiny random models, written by the `gguf` package, and what they stand for.

Names are those of the package's own map, metadata what llama.cpp's converter writes; a model's
weights become what the package makes of their packed bytes, so that transformers is the oracle.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import torch
from family_models import DENSE, router_biases
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from numpy.typing import NDArray
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Choose = Callable[[str, tuple[int, ...]], Type]
"""A tensor's type by its GGUF name and shape."""

PLAIN = (Type.F32, Type.F16, Type.BF16)
QUANTISED = (Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.MXFP4)
"""Types that the package can make of weights; of all others random blocks are taken."""

SCALES = {
    Type.Q4_0: (0,),
    Type.Q4_1: (0, 2),
    Type.Q5_0: (0,),
    Type.Q5_1: (0, 2),
    Type.Q8_0: (0,),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,),
    Type.IQ2_XXS: (0,),
    Type.IQ2_XS: (0,),
    Type.IQ2_S: (0,),
    Type.IQ3_XXS: (0,),
    Type.IQ3_S: (0,),
}
"""Where a block has its float16 scale, and its offset's."""

_MIDDLE = {
    Type.Q4_1: -7.5,
    Type.Q5_1: -15.5,
    Type.Q2_K: 1.5,
    Type.Q4_K: 7.5,
    Type.Q5_K: 15.5,
}  # of a number: offsets take it away


def packed(weights: NDArray[np.float32], kind: Type, seed: int = 0) -> NDArray[Any]:
    """As a file has them: bytes of blocks, or plain numbers."""
    if kind in PLAIN or kind in QUANTISED:
        return gguf.quants.quantize(np.ascontiguousarray(weights), kind)
    return random_blocks(weights.shape, kind, seed, float(weights.std()))


def random_blocks(
    shape: tuple[int, ...], kind: Type, seed: int = 0, std: float = 0.05
) -> NDArray[np.uint8]:
    """Valid blocks of weights of about this spread."""
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    num_blocks = int(np.prod(shape)) // block_size
    blocks = np.random.default_rng(seed).integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    if kind in SCALES:
        _set_scales(blocks, kind, 2.0**-8)
        spread = float(gguf.quants.dequantize(blocks, kind).std())
        _set_scales(blocks, kind, 2.0**-8 * std / spread)
    else:
        blocks[:, 0] = 118 + blocks[:, 0] % 6  # MXFP4's scales are powers of two
    return blocks.reshape(*shape[:-1], shape[-1] // block_size * block_bytes)


def _set_scales(blocks: NDArray[np.uint8], kind: Type, scale: float) -> None:
    values = (scale, scale * _MIDDLE.get(kind, 1.0))
    for start, value in zip(SCALES[kind], values, strict=False):
        blocks[:, start : start + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)


def write_gguf(
    path: Path,
    family: str,
    model: torch.nn.Module,
    choose: Choose,
    add: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> None:
    """Writes a transformers model, whose weights become what the file's bytes stand for.

    add: writes further metadata, such as a tokenizer.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[family]])
    add_metadata(writer, family, config)
    add(writer)
    for number, (name, view, shape) in enumerate(tensors_of(family, model)):
        weights = np.ascontiguousarray(view.float().numpy()).reshape(shape)
        is_vector = weights.ndim == 1 or name.endswith(".bias")
        kind = Type.F32 if is_vector else choose(name, weights.shape)
        data = packed(weights, kind, number)
        whole = gguf.quants.dequantize(data, kind).reshape(view.shape)
        view.copy_(torch.from_numpy(whole.copy()))
        writer.add_tensor(name, data, raw_dtype=kind)
    finish(writer)


def take_weights(path: Path, family: str, model: torch.nn.Module) -> None:
    """A model's weights become what the file's bytes stand for."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, view, _ in tensors_of(family, model):
        tensor = tensors.pop(name)
        whole = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(view.shape)
        view.copy_(torch.from_numpy(whole.copy()))
    assert not tensors, sorted(tensors)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(writer: gguf.GGUFWriter, family: str, config: Any) -> None:
    """Write a config's metadata as llama.cpp's converter does."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers + getattr(config, "num_predicting", 0))
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(_key_heads(family, config))
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", None) or config.norm_eps)
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta}
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if family not in DENSE:
        writer.add_expert_used_count(config.num_experts_per_tok)
    head_dim = getattr(config, "head_dim", None)
    if head_dim:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    _OF_FAMILY[family](writer, config)


def _of_llama(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.head_dim)
    rope = config.rope_parameters
    if rope["rope_type"] == "llama3":
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        own = rope["rope_theta"] ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        writer.add_tensor("rope_freqs.weight", (own / frequencies).numpy())
    _of_dense(writer, config)


def _of_dense(writer: gguf.GGUFWriter, config: Any) -> None:
    if config.rope_parameters["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])


def _of_qwen3(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _of_qwen2(writer: gguf.GGUFWriter, config: Any) -> None:
    _of_qwen3(writer, config)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _of_olmoe(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_experts)


def _of_mixtral(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_local_experts)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)


def _of_latent_attention(writer: gguf.GGUFWriter, config: Any) -> None:
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    if is_expanded_once(config):
        writer.add_key_length(head_dim)
        writer.add_value_length(config.v_head_dim)
    else:
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(head_dim)
        writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _of_deepseek(writer: gguf.GGUFWriter, config: Any) -> None:
    _of_latent_attention(writer, config)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    if config.topk_method != "greedy":
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def _of_sigmoid_router(writer: gguf.GGUFWriter, config: Any) -> None:
    kinds = getattr(config, "mlp_layer_types", None) or []
    num_dense = kinds.count("dense") if kinds else config.first_k_dense_replace
    writer.add_leading_dense_block_count(num_dense)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)


def _of_glm(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.n_routed_experts)
    rotary = config.head_dim * config.rope_parameters["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(rotary))
    writer.add_expert_shared_count(config.n_shared_experts)
    _of_sigmoid_router(writer, config)


def _of_deepseek_v3(writer: gguf.GGUFWriter, config: Any) -> None:
    _of_latent_attention(writer, config)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_shared_count(config.n_shared_experts)
    _of_sigmoid_router(writer, config)


def _of_minimax(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    rotary = config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(rotary))


def _key_heads(family: str, config: Any) -> int | list[int]:
    """Return the number of key heads, by layer where some have no attention."""
    count: int = config.num_key_value_heads
    if not family.startswith("lfm2"):
        return count
    return [count if kind == "full_attention" else 0 for kind in config.layer_types]


def _of_lfm2(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_shortconv_l_cache(config.conv_L_cache)


def _of_lfm2_moe(writer: gguf.GGUFWriter, config: Any) -> None:
    _of_lfm2(writer, config)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_leading_dense_block_count(config.num_dense_layers)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _of_gpt_oss(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_sliding_window(config.sliding_window)


def _of_ling(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_experts)
    writer.add_rope_dimension_count(config.rotary_dim)
    writer.add_expert_shared_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.num_shared_experts)
    _of_sigmoid_router(writer, config)
    if config.num_predicting:
        writer.add_nextn_predict_layers(config.num_predicting)


_OF_FAMILY: dict[str, Callable[[gguf.GGUFWriter, Any], None]] = {
    "llama": _of_llama,
    "qwen2": _of_dense,
    "qwen3": _of_dense,
    "qwen3_moe": _of_qwen3,
    "qwen2_moe": _of_qwen2,
    "olmoe": _of_olmoe,
    "mixtral": _of_mixtral,
    "deepseek_v2": _of_deepseek,
    "glm4_moe": _of_glm,
    "deepseek_v3": _of_deepseek_v3,
    "glm4_moe_lite": _of_deepseek_v3,
    "minimax_m2": _of_minimax,
    "lfm2": _of_lfm2,
    "lfm2_moe": _of_lfm2_moe,
    "gpt_oss": _of_gpt_oss,
    "bailing_moe_v2": _of_ling,
}

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "glm4_moe_lite": gguf.MODEL_ARCH.DEEPSEEK2,
    "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "lfm2_moe": gguf.MODEL_ARCH.LFM2MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
}


def is_expanded_once(config: Any) -> bool:
    """Return True if half of DeepSeek's keys and values come of one matrix, as in older files."""
    return config.v_head_dim == config.qk_nope_head_dim


def tensors_of(
    family: str, model: torch.nn.Module
) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
    """Yield views of a model's parameters in the file's order, with their names and shapes."""
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], model.config.num_hidden_layers)
    for name, parameter in [*model.named_parameters(), *router_biases(model)]:
        for own_name, view in _views(family, name, parameter.data, model.config):
            stored = names.get_name(own_name, try_suffixes=(".weight", ".bias"))
            assert stored is not None, own_name
            is_mixed = view.dim() == 4 or parameter.dim() == 1
            yield stored, view, tuple(parameter.shape) if is_mixed else tuple(view.shape)


def _views(family: str, name: str, weights: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """By the names of published checkpoints, experts of a layer stacked."""
    if ".experts." in name:
        yield from _expert_views(family, name, weights)
    elif family in ("llama", "mixtral") and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = weights.view(heads, 2, -1, *weights.shape[1:])
        yield name, halves.transpose(1, 2)
    elif name.endswith("kv_b_proj.weight") and not is_expanded_once(config):
        heads = weights.view(config.num_attention_heads, -1, weights.shape[1])
        fixed_dim = config.qk_nope_head_dim
        yield name.replace("kv_b", "k_b"), heads[:, :fixed_dim].transpose(1, 2)
        yield name.replace("kv_b", "v_b"), heads[:, fixed_dim:]
    elif name.endswith("conv.conv.weight"):
        yield name, weights.squeeze(1)
    elif name.endswith("expert_bias"):
        yield f"{name}.bias", weights
    elif name.endswith("correction_bias"):
        yield name.replace("correction_bias", "correction.bias"), weights
    elif name.endswith("sinks"):
        yield f"{name}.weight", weights
    else:
        yield name, weights


def _expert_views(family: str, name: str, weights: Tensor) -> Iterator[tuple[str, Tensor]]:
    is_bias = name.endswith("_bias")
    ending = ".bias" if is_bias else ".weight"
    name = name.removesuffix("_bias")
    if family == "gpt_oss" and not is_bias:
        weights = weights.transpose(1, 2)
    if "gate_up_proj" not in name:
        yield name + ending, weights
        return
    both = (weights[:, ::2], weights[:, 1::2]) if family == "gpt_oss" else weights.chunk(2, dim=1)
    for part, view in zip(("gate", "up"), both, strict=True):
        yield name.replace("gate_up", part) + ending, view


def write_ling(
    path: Path,
    config: Mapping[str, Any],
    weights: dict[str, Tensor],
    choose: Choose,
    num_predicting: int = 0,
) -> None:
    """Writes Ling 2.0, whose names are not transformers'; as `write_gguf` changes the weights.

    num_predicting: layers after the last, for the prediction of further tokens.
    """
    writer = gguf.GGUFWriter(path, "bailingmoe2")
    num_layers = config["num_hidden_layers"]
    add_metadata(writer, "bailing_moe_v2", SimpleNamespace(**config, num_predicting=num_predicting))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BAILINGMOE2, num_layers + num_predicting)
    stacks: dict[str, list[str]] = {}
    for name in weights:
        merged = re.sub(r"experts\.[0-9]+\.", "experts.", name)
        stacks.setdefault(merged.replace("expert_bias", "expert_bias.bias"), []).append(name)
    for number, (merged, parts) in enumerate(stacks.items()):
        stored = names.get_name(merged, try_suffixes=(".weight", ".bias"))
        assert stored is not None, merged
        together = [weights[part] for part in parts]
        whole = torch.stack(together) if len(parts) > 1 else together[0]
        kind = Type.F32 if whole.dim() == 1 else choose(stored, tuple(whole.shape))
        data = packed(whole.numpy(), kind, number)
        writer.add_tensor(stored, data, raw_dtype=kind)
        unpacked = torch.from_numpy(gguf.quants.dequantize(data, kind).copy()).view(whole.shape)
        weights |= dict(zip(parts, unpacked if len(parts) > 1 else [unpacked], strict=True))
    for layer in range(num_layers, num_layers + num_predicting):
        writer.add_tensor(f"blk.{layer}.nextn.eh_proj.weight", np.zeros((4, 8), np.float32))
    finish(writer)


def split(path: Path, stem: Path, num_files: int) -> None:
    """Divides a file into several, as llama.cpp does."""
    reader = gguf.GGUFReader(path)
    share = -(-len(reader.tensors) // num_files)
    for number in range(num_files):
        name = f"{stem.name}-{number + 1:05d}-of-{num_files:05d}.gguf"
        writer = gguf.GGUFWriter(stem.with_name(name), "qwen3moe")
        if number == 0:
            copy_metadata(reader, writer)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", num_files)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number * share : (number + 1) * share]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        finish(writer)


def copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0])
