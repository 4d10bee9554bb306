"""GGUF files of tiny random models, written by the `gguf` package, and what they stand for.

Names are those of the package's own map, metadata what llama.cpp's converter writes; a model's
weights become what the package makes of their packed bytes, so that transformers is the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from numpy.typing import NDArray
from torch import Tensor

Choose = Callable[[str, tuple[int, ...]], Type]
"""A tensor's type by its GGUF name and shape."""

PLAIN = (Type.F32, Type.F16, Type.BF16)
QUANTISED = (Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.MXFP4)
"""Types that the package can make of weights; of all others random blocks are taken."""

SCALES = {
    Type.Q4_0: (0,),
    Type.Q4_1: (0, 2),
    Type.Q5_0: (0,),
    Type.Q8_0: (0,),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,),
}
"""Where a block has its float16 scale, and its offset's."""

_MIDDLE = {
    Type.Q4_1: -7.5,
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


def write_gguf(path: Path, family: str, model: torch.nn.Module, choose: Choose) -> None:
    """Writes a transformers model, whose weights become what the file's bytes stand for."""
    config = model.config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[family]])
    add_metadata(writer, family, config)
    for number, (name, parameter) in enumerate(_tensors(family, model)):
        weights = parameter.detach().float().numpy()
        kind = choose(name, weights.shape) if weights.ndim > 1 else Type.F32
        data = packed(np.ascontiguousarray(weights), kind, number)
        with torch.no_grad():
            whole = gguf.quants.dequantize(data, kind).reshape(weights.shape)
            parameter.copy_(torch.from_numpy(whole.copy()))
        writer.add_tensor(name, data, raw_dtype=kind)
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(writer: gguf.GGUFWriter, family: str, config: Any) -> None:
    """What llama.cpp's converter writes of a config."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_expert_used_count(config.num_experts_per_tok)
    head_dim = getattr(config, "head_dim", None)
    if head_dim:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    _OF_FAMILY[family](writer, config)


def _of_qwen3(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _of_olmoe(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_experts)


_OF_FAMILY: dict[str, Callable[[gguf.GGUFWriter, Any], None]] = {
    "qwen3_moe": _of_qwen3,
    "olmoe": _of_olmoe,
}

ARCHITECTURES = {
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
}


def _tensors(family: str, model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Views of a model's parameters, shaped as the file has them, by the file's names."""
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], model.config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        for own_name, view in _views(family, name, parameter):
            stored = names.get_name(own_name, try_suffixes=(".weight", ".bias"))
            assert stored is not None, own_name
            yield stored, view


def _views(family: str, name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """By the names of published checkpoints, experts of a layer stacked."""
    parameter = parameter.data
    if name.endswith("experts.gate_up_proj"):
        gate, up = parameter.chunk(2, dim=1)
        yield name.replace("gate_up_proj", "gate_proj.weight"), gate
        yield name.replace("gate_up_proj", "up_proj.weight"), up
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", parameter
    else:
        yield name, parameter
