"""Writes small checkpoint files byte by byte, right or wrong on purpose, and reads tensors back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lowtide.model_folder.checkpoint import Checkpoint

TYPE_NAMES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "uint8": "U8"}
ARRAY_DTYPES = dict(zip(TYPE_NAMES.values(), TYPE_NAMES, strict=True)) | {"BOOL": "bool"}


def safetensors_bytes(header: object, data: bytes = b"", header_bytes: int | None = None) -> bytes:
    """A file with this header (an object, or raw bytes), whatever it says about `data`."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(raw) if header_bytes is None else header_bytes
    return length.to_bytes(8, "little") + raw + data


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "U8") -> dict:
    return {
        "dtype": dtype,
        "shape": [end - begin] if shape is None else shape,
        "data_offsets": [begin, end],
    }


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """A right file with the arrays in the order given; uint16 is written as BF16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        header[name] = entry(begin, end, list(array.shape), TYPE_NAMES[array.dtype.name])
    path.write_bytes(safetensors_bytes(header, b"".join(a.tobytes() for a in arrays.values())))


def write_index(folder: Path, weight_map: Mapping[str, object]) -> None:
    text = json.dumps({"metadata": {}, "weight_map": dict(weight_map)})
    (folder / "model.safetensors.index.json").write_text(text)


def read_array(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """A tensor in its own type and shape, by its entry; bfloat16 as the bits in uint16."""
    entry = checkpoint.tensors[name]
    data = checkpoint.files[entry.file].path.read_bytes()[entry.offset :][: entry.num_bytes]
    return np.frombuffer(data, ARRAY_DTYPES[entry.dtype]).reshape(entry.shape)


LAYOUTS = ("per expert", "transformers", "VeOmni", "dInfer")
"""Of the experts; and there is "Mixtral", whose experts are single, too."""

_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def in_layout(
    weights: Mapping[str, Any],
    layout: str,
    stack: Callable[..., Any] = np.stack,
    join: Callable[..., Any] = np.concatenate,
) -> dict[str, Any]:
    """Tensors with a name for each expert, theirs or Mixtral's, in one of the layouts.

    stack, join: of a list of tensors, along a new first axis, and along one that is given.
    """
    result = {}
    parts: dict[tuple[str, str], dict[int, Any]] = {}
    for name, tensor in weights.items():
        # A file in another tool's layout calls Mixtral's layer as all others.
        name = name.replace("block_sparse_moe", "mlp")
        if ".experts." in name:
            for ours, theirs in _MIXTRAL.items():
                name = name.replace(f".{theirs}.", f".{ours}.")
        prefix, is_expert, rest = name.partition(".experts.")
        if not is_expert or layout == "per expert":
            result[name] = tensor
            continue
        expert, part, _ = rest.split(".")
        if layout == "Mixtral":
            prefix = prefix.replace("mlp", "block_sparse_moe")
            result[f"{prefix}.experts.{expert}.{_MIXTRAL[part]}.weight"] = tensor
        parts.setdefault((prefix, part), {})[int(expert)] = tensor
    if layout == "Mixtral":
        return result
    stacks = {key: stack([x[i] for i in sorted(x)]) for key, x in parts.items()}
    for prefix in {prefix for prefix, _ in stacks}:
        gate, up, down = (stacks[prefix, f"{part}_proj"] for part in ("gate", "up", "down"))
        if layout == "VeOmni":
            stacked = {"experts.down_proj": down, "experts.up_proj": up, "experts.gate_proj": gate}
        elif layout == "dInfer":
            stacked = {"w1": join([gate, up], 1), "w2": down}
        else:
            stacked = {"experts.gate_up_proj": join([gate, up], 1), "experts.down_proj": down}
        result |= {f"{prefix}.{name}": tensor for name, tensor in stacked.items()}
    return result


def ling_config(**changes: object) -> dict[str, Any]:
    """The published LLaDA2.0-mini values; a change to None leaves the key out."""
    config: dict[str, Any] = {
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        "num_hidden_layers": 20,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "hidden_act": "silu",
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "first_k_dense_replace": 1,
        "vocab_size": 157184,
        "tie_word_embeddings": False,
        "rope_theta": 600000,
        "partial_rotary_factor": 0.5,
        "rotary_dim": 64,
        "rope_scaling": None,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "use_bias": False,
        "use_qkv_bias": False,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "norm_head": False,
        "norm_softmax": False,
        "pad_token_id": 156892,
        "torch_dtype": "bfloat16",
    }
    config.update(changes)
    return {name: value for name, value in config.items() if value is not None}


FLASH: dict[str, Any] = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
}

TINY: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "rotary_dim": 2,
    "intermediate_size": 6,
    "moe_intermediate_size": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "vocab_size": 16,
    "mask_token_id": 15,
    "pad_token_id": None,
    "max_position_embeddings": 64,
}
