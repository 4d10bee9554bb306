"""Writes GGUF files of the first published layers of models with other kinds of attention.

gpt-oss-20b: windows, sinks, biases and clamped experts in MXFP4, everything else in Q8_0.
DeepSeek-V2-Lite: latents, in Q4_0 with the head in Q6_K. Norms, routers and biases are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.random_gguf import WEIGHT, FileTensor, write_random_gguf

NUM_LAYERS, NUM_WORDS = 6, 50_000

Part = tuple[str, str, tuple[int, ...]]
"""A tensor of a layer: name, type, shape."""


class LayerFile(NamedTuple):
    """What a file has, and what a token of it goes through."""

    architecture: str
    hidden: int
    kinds: tuple[str, str]  # of embedding and head
    parts: Callable[[int], Iterator[Part]]  # of a layer
    write_settings: Callable[[Any], None]
    share_of_experts: float
    cache_bytes: Callable[[int], int]  # keys and values that a token sees at a depth

    def write(self, target: Path) -> Path:
        """Write the file once. Raises ImportError without `gguf`."""
        return write_random_gguf(
            target, self.architecture, self._tensors(), self.write_settings, _content
        )

    def _tensors(self) -> Iterator[FileTensor]:
        embedding, head = self.kinds
        yield FileTensor("token_embd.weight", embedding, (NUM_WORDS, self.hidden))
        yield FileTensor("output_norm.weight", "F32", (self.hidden,))
        yield FileTensor("output.weight", head, (NUM_WORDS, self.hidden))
        for layer in range(NUM_LAYERS):
            for name, kind, shape in self.parts(layer):
                yield FileTensor(f"blk.{layer}.{name}", kind, shape)


_GPT_HIDDEN, _GPT_HEADS, _GPT_KV_HEADS, _GPT_HEAD_WIDTH = 2880, 64, 8, 64
_GPT_EXPERTS, _GPT_CHOSEN, _GPT_WINDOW = 32, 4, 128


def _gpt_oss(layer: int) -> Iterator[Part]:
    hidden, inner = _GPT_HIDDEN, _GPT_HEADS * _GPT_HEAD_WIDTH
    for norm in ("attn_norm", "post_attention_norm"):
        yield f"{norm}.weight", "F32", (hidden,)
    for part, heads in (("q", _GPT_HEADS), ("k", _GPT_KV_HEADS), ("v", _GPT_KV_HEADS)):
        yield f"attn_{part}.weight", "Q8_0", (heads * _GPT_HEAD_WIDTH, hidden)
        yield f"attn_{part}.bias", "F32", (heads * _GPT_HEAD_WIDTH,)
    yield "attn_output.weight", "Q8_0", (hidden, inner)
    yield "attn_output.bias", "F32", (hidden,)
    yield "attn_sinks.weight", "F32", (_GPT_HEADS,)
    yield "ffn_gate_inp.weight", "F32", (_GPT_EXPERTS, hidden)
    yield "ffn_gate_inp.bias", "F32", (_GPT_EXPERTS,)
    for part in ("gate", "up", "down"):  # as wide as the hidden states
        yield f"ffn_{part}_exps.weight", "MXFP4", (_GPT_EXPERTS, hidden, hidden)
        yield f"ffn_{part}_exps.bias", "F32", (_GPT_EXPERTS, hidden)


def _gpt_oss_settings(writer: Any) -> None:
    _write_usual(writer, _GPT_HIDDEN, _GPT_HEADS, _GPT_KV_HEADS, 1e-5)
    writer.add_key_length(_GPT_HEAD_WIDTH)
    writer.add_value_length(_GPT_HEAD_WIDTH)
    writer.add_feed_forward_length(_GPT_HIDDEN)
    writer.add_sliding_window(_GPT_WINDOW)
    writer.add_rope_freq_base(150_000.0)
    _write_yarn(writer, 32.0)
    _write_experts(writer, _GPT_EXPERTS, _GPT_CHOSEN, _GPT_HIDDEN)


def _gpt_oss_cache(depth: int) -> int:
    token_bytes = 2 * 2 * _GPT_KV_HEADS * _GPT_HEAD_WIDTH
    return NUM_LAYERS // 2 * token_bytes * (depth + min(depth, _GPT_WINDOW))


_MLA_HIDDEN, _MLA_HEADS, _MLA_RANK = 2048, 16, 512
_MLA_FIXED, _MLA_ROTARY, _MLA_VALUE = 128, 64, 128  # dimensions of a head
_MLA_EXPERTS, _MLA_CHOSEN, _MLA_SHARED, _MLA_EXPERT_WIDTH, _MLA_DENSE_WIDTH = 64, 6, 2, 1408, 10944


def _deepseek(layer: int) -> Iterator[Part]:
    hidden, heads, rank = _MLA_HIDDEN, _MLA_HEADS, _MLA_RANK
    yield "attn_norm.weight", "F32", (hidden,)
    yield "attn_kv_a_norm.weight", "F32", (rank,)
    yield "ffn_norm.weight", "F32", (hidden,)
    yield "attn_q.weight", "Q4_0", (heads * (_MLA_FIXED + _MLA_ROTARY), hidden)
    yield "attn_kv_a_mqa.weight", "Q4_0", (rank + _MLA_ROTARY, hidden)
    yield "attn_k_b.weight", "Q4_0", (heads, rank, _MLA_FIXED)
    yield "attn_v_b.weight", "Q4_0", (heads, _MLA_VALUE, rank)
    yield "attn_output.weight", "Q4_0", (hidden, heads * _MLA_VALUE)
    if layer == 0:
        yield from _gated("", (), hidden, _MLA_DENSE_WIDTH)
        return
    yield "ffn_gate_inp.weight", "F32", (_MLA_EXPERTS, hidden)
    yield from _gated("_exps", (_MLA_EXPERTS,), hidden, _MLA_EXPERT_WIDTH)
    yield from _gated("_shexp", (), hidden, _MLA_SHARED * _MLA_EXPERT_WIDTH)


def _gated(suffix: str, count: tuple[int, ...], hidden: int, width: int) -> Iterator[Part]:
    for part in ("gate", "up"):
        yield f"ffn_{part}{suffix}.weight", "Q4_0", (*count, width, hidden)
    yield f"ffn_down{suffix}.weight", "Q4_0", (*count, hidden, width)


def _deepseek_settings(writer: Any) -> None:
    _write_usual(writer, _MLA_HIDDEN, _MLA_HEADS, 1, 1e-6)
    writer.add_feed_forward_length(_MLA_DENSE_WIDTH)
    writer.add_leading_dense_block_count(1)
    writer.add_q_lora_rank(0)  # which llama.cpp asks for in files of other numbers of layers
    writer.add_kv_lora_rank(_MLA_RANK)
    # Of the latent that all heads share, and of a head.
    writer.add_key_length(_MLA_RANK + _MLA_ROTARY)
    writer.add_value_length(_MLA_RANK)
    writer.add_key_length_mla(_MLA_FIXED + _MLA_ROTARY)
    writer.add_value_length_mla(_MLA_VALUE)
    writer.add_rope_dimension_count(_MLA_ROTARY)
    writer.add_rope_freq_base(10_000.0)
    _write_yarn(writer, 40.0)
    writer.add_rope_scaling_yarn_log_mul(0.0707)
    writer.add_expert_shared_count(_MLA_SHARED)
    writer.add_expert_weights_scale(1.0)
    _write_experts(writer, _MLA_EXPERTS, _MLA_CHOSEN, _MLA_EXPERT_WIDTH)


def _deepseek_cache(depth: int) -> int:
    return NUM_LAYERS * depth * 2 * (_MLA_RANK + _MLA_ROTARY)


def _write_usual(writer: Any, hidden: int, heads: int, kv_heads: int, epsilon: float) -> None:
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(131_072)
    writer.add_embedding_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(epsilon)
    writer.add_vocab_size(NUM_WORDS)
    writer.add_tokenizer_model("none")


def _write_yarn(writer: Any, factor: float) -> None:
    import gguf

    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(factor)
    writer.add_rope_scaling_orig_ctx_len(4096)


def _write_experts(writer: Any, count: int, num_chosen: int, width: int) -> None:
    writer.add_expert_count(count)
    writer.add_expert_used_count(num_chosen)
    writer.add_expert_feed_forward_length(width)


def _content(tensor: FileTensor, rng: np.random.Generator) -> NDArray[Any]:
    drawn = WEIGHT * rng.standard_normal(tensor.shape, dtype=np.float32)
    return 1 + drawn if "norm" in tensor.name else drawn


FILES = {
    "gpt_oss": LayerFile(
        "gpt-oss",
        _GPT_HIDDEN,
        ("Q8_0", "Q8_0"),
        _gpt_oss,
        _gpt_oss_settings,
        _GPT_CHOSEN / _GPT_EXPERTS,
        _gpt_oss_cache,
    ),
    "deepseek_v2": LayerFile(
        "deepseek2",
        _MLA_HIDDEN,
        ("Q4_0", "Q6_K"),
        _deepseek,
        _deepseek_settings,
        _MLA_CHOSEN / _MLA_EXPERTS,
        _deepseek_cache,
    ),
}
"""By family."""
