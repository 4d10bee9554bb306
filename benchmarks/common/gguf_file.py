"""Writes a Qwen3-MoE checkpoint as GGUF for llama.cpp, a tensor at a time.

Norms and routers are float32 there, everything else stays bfloat16 or, asked for in 4 bits, is
rounded to Q4_0, embedding and head to Q8_0. Without a vocabulary in the file prompts are token ids.
Needs the `gguf` package.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from lowtide.model_writing.safetensors_writer import check_disk_space

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


def write_gguf(
    source: Path, target: Path, is_quantised: bool = False, has_words: bool = False
) -> Path:
    """The checkpoint in `source` as the file `target`, once, with the same bytes or in 4 bits.

    has_words: with the byte-level vocabulary of its `tokenizer.json`.

    Raises ImportError without `gguf`, StorageError for a disk that is too small.
    """
    import gguf

    if target.exists():
        return target
    config = json.loads((source / "config.json").read_text())
    target.parent.mkdir(parents=True, exist_ok=True)
    checkpoint_bytes = sum(shard.stat().st_size for shard in source.glob("*.safetensors"))
    check_disk_space(target.parent, checkpoint_bytes * 5 // (16 if is_quantised else 5))
    partial = target.with_suffix(".part")
    writer = gguf.GGUFWriter(partial, "qwen3moe")
    _write_settings(writer, config)
    if has_words:
        _write_words(writer, json.loads((source / "tokenizer.json").read_text()), config)
    else:
        writer.add_tokenizer_model("none")
    with _Shards(source) as shards:
        tensors = [each._replace(kind=_kind(each, is_quantised)) for each in _tensors(config)]
        for name, parts, kind in tensors:
            rows = math.prod((len(parts), *shards.shape(parts[0])[:-1]))
            width = shards.shape(parts[0])[-1]
            block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
            shape = (*((len(parts),) if len(parts) > 1 else ()), *shards.shape(parts[0]))
            row_bytes = width // block * block_bytes
            writer.add_tensor_info(
                name,
                (*shape[:-1], row_bytes) if kind != "F32" else shape,
                np.dtype(np.uint8 if kind != "F32" else np.float32),
                rows * row_bytes,
                raw_dtype=gguf.GGMLQuantizationType[kind],
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, parts, kind in tensors:
            writer.write_tensor_data(_content([shards.read(part) for part in parts], kind))
    writer.close()
    os.replace(partial, target)
    return target


class _Named(NamedTuple):
    """A tensor of the file: what it is called there, what it is made of, and its type."""

    name: str
    parts: Sequence[str]
    kind: str = ""


class _Shards:
    """The tensors of a checkpoint, whatever file they are in."""

    def __init__(self, folder: Path) -> None:
        self._paths = sorted(folder.glob("*.safetensors"))
        self._files = ExitStack()
        self._file_of: dict[str, Any] = {}

    def __enter__(self) -> _Shards:
        for path in self._paths:
            file = self._files.enter_context(safe_open(path, framework="pt"))
            self._file_of |= dict.fromkeys(file.keys(), file)
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor


def _kind(tensor: _Named, is_quantised: bool) -> str:
    if "norm" in tensor.name or "ffn_gate_inp" in tensor.name:
        return "F32"
    if not is_quantised:
        return "BF16"
    return "Q8_0" if tensor.name in ("token_embd.weight", "output.weight") else "Q4_0"


def _content(parts: Sequence[Tensor], kind: str) -> NDArray[Any]:
    """A tensor's bytes; the parts of a stacked one are rounded one by one."""
    import gguf

    if kind == "BF16":
        return np.concatenate([part.contiguous().view(torch.uint8).numpy() for part in parts])
    wide = (part.float().numpy() for part in parts)
    if kind == "F32":
        return np.concatenate(list(wide))
    return np.concatenate([gguf.quantize(each, gguf.GGMLQuantizationType[kind]) for each in wide])


def quantise_gguf(source: Path, kind: str) -> Path:
    """`source` as llama.cpp itself stores it in `kind` ("Q4_K_M", ...), once, beside it.

    Raises ImportError without `llama_cpp`, RuntimeError where llama.cpp refuses.
    """
    import llama_cpp

    target = source.with_name(f"{source.stem}-{kind}.gguf")
    if target.exists():
        return target
    partial = target.with_suffix(".part")
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    failed = llama_cpp.llama_model_quantize(
        os.fsencode(source), os.fsencode(partial), ctypes.byref(settings)
    )
    if failed:
        raise RuntimeError(f"llama.cpp did not store {source} as {kind}.")
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


def _write_words(writer: Any, tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """A text for each row of the embedding; those beyond the tokenizer have made-up ones."""
    import gguf

    words = {token: text for text, token in tokenizer["model"]["vocab"].items()}
    special = {added["id"] for added in tokenizer["added_tokens"]}
    tokens = range(config["vocab_size"])
    text = words.keys() - special
    kinds = [gguf.TokenType.NORMAL if t in text else gguf.TokenType.CONTROL for t in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([words.get(token, f"<unused {token}>") for token in tokens])
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def _tensors(config: Mapping[str, Any]) -> Iterator[_Named]:
    """Tensors under llama.cpp's names; a layer's experts are stacked."""
    for theirs, ours in _OTHERS.items():
        yield _Named(f"{ours}.weight", [f"{theirs}.weight"])
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for theirs, ours in _OF_A_LAYER.items():
            yield _Named(f"blk.{layer}.{ours}.weight", [f"{prefix}{theirs}.weight"])
        for part in ("gate", "up", "down"):
            names = [
                f"{prefix}mlp.experts.{expert}.{part}_proj.weight"
                for expert in range(config["num_experts"])
            ]
            yield _Named(f"blk.{layer}.ffn_{part}_exps.weight", names)
