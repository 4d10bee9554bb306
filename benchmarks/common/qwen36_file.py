"""Writes a GGUF file in the shape of Qwen3.6-35B-A3B, of random weights.

As usual quantisations have it: mixers and shared experts in Q8_0, experts in Q4_K, the head in
Q6_K, routers, norms and the delta-nets' small tensors in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.random_gguf import WEIGHT, FileTensor, write_random_gguf

ARCHITECTURE = "qwen35moe"
HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_WIDTH, ROTARY = 2048, 16, 2, 256, 64
KEY_HEADS, VALUE_HEADS, STATE, KERNEL = 16, 32, 128, 4
NUM_EXPERTS, NUM_CHOSEN, EXPERT_WIDTH = 256, 8, 512
INTERVAL = 4  # one attention in so many layers


class Sizes(NamedTuple):
    """Sizes that may be smaller than the published model's."""

    num_layers: int = 40
    num_words: int = 248_320
    skew: float = 0.0
    """Standard deviation of the logarithms of routers' rows: longer rows are chosen more often."""


def write_qwen36(target: Path, sizes: Sizes, seed: int = 0) -> Path:
    """Write the file once. Raises ImportError without `gguf`, StorageError for a small disk."""
    content, settings = partial(_content, sizes.skew), partial(_write_settings, sizes)
    return write_random_gguf(target, ARCHITECTURE, _tensors(sizes), settings, content, seed)


def _tensors(sizes: Sizes) -> Iterator[FileTensor]:
    yield FileTensor("token_embd.weight", "Q8_0", (sizes.num_words, HIDDEN))
    yield FileTensor("output_norm.weight", "F32", (HIDDEN,))
    yield FileTensor("output.weight", "Q6_K", (sizes.num_words, HIDDEN))
    for layer in range(sizes.num_layers):
        is_attention = layer % INTERVAL == INTERVAL - 1
        for part, kind, shape in (
            *(_attention() if is_attention else _delta_net()),
            *_mlp(),
        ):
            yield FileTensor(f"blk.{layer}.{part}", kind, shape)


def _attention() -> Iterator[FileTensor]:
    for part, rows in (("q", 2 * NUM_HEADS), ("k", NUM_KV_HEADS), ("v", NUM_KV_HEADS)):
        yield FileTensor(f"attn_{part}.weight", "Q8_0", (rows * HEAD_WIDTH, HIDDEN))
    yield FileTensor("attn_output.weight", "Q8_0", (HIDDEN, NUM_HEADS * HEAD_WIDTH))
    for part in "qk":
        yield FileTensor(f"attn_{part}_norm.weight", "F32", (HEAD_WIDTH,))


def _delta_net() -> Iterator[FileTensor]:
    channels, inner = (2 * KEY_HEADS + VALUE_HEADS) * STATE, VALUE_HEADS * STATE
    yield FileTensor("attn_qkv.weight", "Q8_0", (channels, HIDDEN))
    yield FileTensor("attn_gate.weight", "Q8_0", (inner, HIDDEN))
    for part in ("alpha", "beta"):
        yield FileTensor(f"ssm_{part}.weight", "F32", (VALUE_HEADS, HIDDEN))
    yield FileTensor("ssm_conv1d.weight", "F32", (channels, KERNEL))
    yield FileTensor("ssm_dt.bias", "F32", (VALUE_HEADS,))
    yield FileTensor("ssm_a", "F32", (VALUE_HEADS,))
    yield FileTensor("ssm_norm.weight", "F32", (STATE,))
    yield FileTensor("ssm_out.weight", "Q8_0", (HIDDEN, inner))


def _mlp() -> Iterator[FileTensor]:
    for norm in ("attn_norm", "post_attention_norm"):
        yield FileTensor(f"{norm}.weight", "F32", (HIDDEN,))
    yield FileTensor("ffn_gate_inp.weight", "F32", (NUM_EXPERTS, HIDDEN))
    yield FileTensor("ffn_gate_inp_shexp.weight", "F32", (HIDDEN,))
    for suffix, kind, count in (("shexp", "Q8_0", ()), ("exps", "Q4_K", (NUM_EXPERTS,))):
        for part in ("gate", "up"):
            yield FileTensor(f"ffn_{part}_{suffix}.weight", kind, (*count, EXPERT_WIDTH, HIDDEN))
        yield FileTensor(f"ffn_down_{suffix}.weight", kind, (*count, HIDDEN, EXPERT_WIDTH))


def _content(skew: float, tensor: FileTensor, rng: np.random.Generator) -> NDArray[Any]:
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


def _write_settings(sizes: Sizes, writer: Any) -> None:
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
