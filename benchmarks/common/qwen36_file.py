"""Writes a GGUF file in the shape of Qwen3.6-35B-A3B, of random weights, a tensor at a time.

As usual quantisations have it: mixers and shared experts in Q8_0, experts in Q4_K, the head in
Q6_K, routers, norms and the delta-nets' small tensors in float32. Needs the `gguf` package.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.model_writing.safetensors_writer import check_disk_space

ARCHITECTURE = "qwen35moe"
HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_WIDTH, ROTARY = 2048, 16, 2, 256, 64
KEY_HEADS, VALUE_HEADS, STATE, KERNEL = 16, 32, 128, 4
NUM_EXPERTS, NUM_CHOSEN, EXPERT_WIDTH = 256, 8, 512
INTERVAL = 4  # one attention in so many layers
WEIGHT = 0.02  # standard deviation

Draw = Callable[[np.random.Generator, int], NDArray[np.uint8]]


class Sizes(NamedTuple):
    """Sizes that may be smaller than the published model's."""

    num_layers: int = 40
    num_words: int = 248_320
    skew: float = 0.0
    """Standard deviation of the logarithms of routers' rows: longer rows are chosen more often."""


def write_qwen36(target: Path, sizes: Sizes, seed: int = 0) -> Path:
    """Write the file once. Raises ImportError without `gguf`, StorageError for a small disk."""
    import gguf

    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    tensors = list(_tensors(sizes))
    check_disk_space(target.parent, sum(_num_bytes(each) for each in tensors) * 51 // 50)
    partial = target.with_suffix(".part")
    writer = gguf.GGUFWriter(partial, ARCHITECTURE)
    _write_settings(writer, sizes)
    for name, kind, shape in tensors:
        block, block_bytes = _blocks(kind)
        is_plain = kind == "F32"
        packed = (*shape[:-1], shape[-1] // block * block_bytes)
        writer.add_tensor_info(
            name,
            shape if is_plain else packed,
            np.dtype(np.float32 if is_plain else np.uint8),
            _num_bytes(_Tensor(name, kind, shape)),
            raw_dtype=gguf.GGMLQuantizationType[kind],
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(seed)
    for each in tensors:
        writer.write_tensor_data(_content(each, rng, sizes.skew))
    writer.close()
    os.replace(partial, target)
    return target


class _Tensor(NamedTuple):
    name: str
    kind: str
    shape: tuple[int, ...]


def _tensors(sizes: Sizes) -> Iterator[_Tensor]:
    yield _Tensor("token_embd.weight", "Q8_0", (sizes.num_words, HIDDEN))
    yield _Tensor("output_norm.weight", "F32", (HIDDEN,))
    yield _Tensor("output.weight", "Q6_K", (sizes.num_words, HIDDEN))
    for layer in range(sizes.num_layers):
        is_attention = layer % INTERVAL == INTERVAL - 1
        for part, kind, shape in (
            *(_attention() if is_attention else _delta_net()),
            *_mlp(),
        ):
            yield _Tensor(f"blk.{layer}.{part}", kind, shape)


def _attention() -> Iterator[_Tensor]:
    for part, rows in (("q", 2 * NUM_HEADS), ("k", NUM_KV_HEADS), ("v", NUM_KV_HEADS)):
        yield _Tensor(f"attn_{part}.weight", "Q8_0", (rows * HEAD_WIDTH, HIDDEN))
    yield _Tensor("attn_output.weight", "Q8_0", (HIDDEN, NUM_HEADS * HEAD_WIDTH))
    for part in "qk":
        yield _Tensor(f"attn_{part}_norm.weight", "F32", (HEAD_WIDTH,))


def _delta_net() -> Iterator[_Tensor]:
    channels, inner = (2 * KEY_HEADS + VALUE_HEADS) * STATE, VALUE_HEADS * STATE
    yield _Tensor("attn_qkv.weight", "Q8_0", (channels, HIDDEN))
    yield _Tensor("attn_gate.weight", "Q8_0", (inner, HIDDEN))
    for part in ("alpha", "beta"):
        yield _Tensor(f"ssm_{part}.weight", "F32", (VALUE_HEADS, HIDDEN))
    yield _Tensor("ssm_conv1d.weight", "F32", (channels, KERNEL))
    yield _Tensor("ssm_dt.bias", "F32", (VALUE_HEADS,))
    yield _Tensor("ssm_a", "F32", (VALUE_HEADS,))
    yield _Tensor("ssm_norm.weight", "F32", (STATE,))
    yield _Tensor("ssm_out.weight", "Q8_0", (HIDDEN, inner))


def _mlp() -> Iterator[_Tensor]:
    for norm in ("attn_norm", "post_attention_norm"):
        yield _Tensor(f"{norm}.weight", "F32", (HIDDEN,))
    yield _Tensor("ffn_gate_inp.weight", "F32", (NUM_EXPERTS, HIDDEN))
    yield _Tensor("ffn_gate_inp_shexp.weight", "F32", (HIDDEN,))
    for suffix, kind, count in (("shexp", "Q8_0", ()), ("exps", "Q4_K", (NUM_EXPERTS,))):
        for part in ("gate", "up"):
            yield _Tensor(f"ffn_{part}_{suffix}.weight", kind, (*count, EXPERT_WIDTH, HIDDEN))
        yield _Tensor(f"ffn_down_{suffix}.weight", kind, (*count, HIDDEN, EXPERT_WIDTH))


def _blocks(kind: str) -> tuple[int, int]:
    """Weights of a block, and its bytes."""
    import gguf

    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return int(block), int(block_bytes)


def _num_bytes(tensor: _Tensor) -> int:
    block, block_bytes = _blocks(tensor.kind)
    return math.prod(tensor.shape) // block * block_bytes


def _content(tensor: _Tensor, rng: np.random.Generator, skew: float) -> NDArray[Any]:
    if tensor.kind != "F32":
        return _PACKED[tensor.kind](rng, _num_bytes(tensor) // _blocks(tensor.kind)[1]).ravel()
    drawn = rng.standard_normal(tensor.shape, dtype=np.float32)
    if "norm" in tensor.name:  # files have 1 + w
        return 1 + WEIGHT * drawn
    if tensor.name.endswith("ssm_a"):  # -exp(A_log)
        return -np.exp(drawn)
    if tensor.name.endswith("ssm_conv1d.weight"):
        return 0.5 * drawn
    if tensor.name.endswith("ffn_gate_inp.weight"):
        drawn *= np.exp(skew * rng.standard_normal((NUM_EXPERTS, 1), dtype=np.float32))
    return WEIGHT * drawn


def _halves(count: int, scale: float) -> NDArray[np.uint8]:
    """Return `count` copies of a scale as the bytes of float16."""
    return np.full((count, 1), scale, np.float16).view(np.uint8)


def _q8_0(rng: np.random.Generator, count: int) -> NDArray[np.uint8]:
    weights = rng.integers(0, 256, (count, 32), np.uint8)
    return np.concatenate([_halves(count, WEIGHT / 74), weights], 1)


def _q4_k(rng: np.random.Generator, count: int) -> NDArray[np.uint8]:
    rest = rng.integers(0, 256, (count, 140), np.uint8)
    scale = WEIGHT / 257
    return np.concatenate([_halves(count, scale), _halves(count, 7.5 * scale), rest], 1)


def _q6_k(rng: np.random.Generator, count: int) -> NDArray[np.uint8]:
    weights = rng.integers(0, 256, (count, 192), np.uint8)
    scales = rng.integers(32, 96, (count, 16), np.uint8)
    return np.concatenate([weights, scales, _halves(count, WEIGHT / 1220)], 1)


_PACKED: dict[str, Draw] = {"Q8_0": _q8_0, "Q4_K": _q4_k, "Q6_K": _q6_k}


def _write_settings(writer: Any, sizes: Sizes) -> None:
    writer.add_block_count(sizes.num_layers)
    writer.add_context_length(262_144)
    writer.add_embedding_length(HIDDEN)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_key_length(HEAD_WIDTH)
    writer.add_value_length(HEAD_WIDTH)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e7)
    writer.add_rope_dimension_count(ROTARY)
    writer.add_array(f"{ARCHITECTURE}.rope.dimension_sections", [11, 11, 10, 0])
    writer.add_expert_count(NUM_EXPERTS)
    writer.add_expert_used_count(NUM_CHOSEN)
    writer.add_expert_feed_forward_length(EXPERT_WIDTH)
    writer.add_uint32(f"{ARCHITECTURE}.expert_shared_feed_forward_length", EXPERT_WIDTH)
    writer.add_uint32(f"{ARCHITECTURE}.full_attention_interval", INTERVAL)
    for key, value in {
        "conv_kernel": KERNEL,
        "state_size": STATE,
        "group_count": KEY_HEADS,
        "time_step_rank": VALUE_HEADS,
        "inner_size": VALUE_HEADS * STATE,
    }.items():
        writer.add_uint32(f"{ARCHITECTURE}.ssm.{key}", value)
    writer.add_vocab_size(sizes.num_words)
    writer.add_tokenizer_model("none")
