"""Models of published layers, but fewer of them: whole behaviour at a part of the size."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.models import cache_folder
from common.record import say
from lowtide.errors import UsageError
from lowtide.families import SynthSize, families
from lowtide.lab.synth import write_checkpoint
from lowtide.lab.synth_weights import tensors_of

_TOY = {
    "max_position_embeddings": 8192,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "vocab_size": 8192,
    "intermediate_size": 1024,
    "dense_intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "moe_shared_expert_intermediate_size": 256,
    "expert_intermediate_size": 256,
    "head_dim": 64,
    "rotary_dim": 32,
    "eos_token_id": 8000,
    "pad_token_id": 8000,
    "mask_token_id": 8003,
}
"""What a toy has of its own, where its family has it; experts and routing stay published."""


def cut_model(family: str, max_bytes: int, is_toy: bool = False) -> Path:
    """A `synth` of as many published layers as there is room for, made once and kept.

    is_toy: of narrow layers. Raises UsageError where not even two layers are as small.
    """
    size = families()[family].sizes()["full"]
    if is_toy:
        own = {name: value for name, value in _TOY.items() if name in size.config}
        own["num_key_value_heads"] = min(8, size.config["num_key_value_heads"])
        own |= {name: _TOY[name] for name in ("eos_token_id", "mask_token_id")}
        size = replace(size, config={**size.config, **own}, eos_token_id=8000)
    fewer = range(size.config["num_hidden_layers"] + 1)
    num_layers = bisect_right(fewer, max_bytes, lo=2, key=lambda n: _cut_bytes(size, n)) - 1
    if num_layers < 2:
        raise UsageError(f"Two layers of {family} are more than {max_bytes} bytes.")
    name = f"{family}-{num_layers}-layers{'-toy' if is_toy else ''}"
    return _written(_with_layers(size, num_layers), name)


def model_of_layers(family: str, num_layers: int) -> Path:
    """A `synth` of the first so many published layers, made once and kept."""
    size = families()[family].sizes()["full"]
    return _written(_with_layers(size, num_layers), f"{family}-{num_layers}-layers")


def weight_bytes(folder: Path) -> int:
    """Of a model's files."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _with_layers(size: SynthSize, num_layers: int) -> SynthSize:
    config: Mapping[str, Any] = {
        name: value[:num_layers] if isinstance(value, list) and name == "moe_layer_freq" else value
        for name, value in size.config.items()
    }
    return replace(size, config={**config, "num_hidden_layers": num_layers})


def _cut_bytes(size: SynthSize, num_layers: int) -> int:
    return sum(tensor.output.num_bytes for tensor in tensors_of(_with_layers(size, num_layers)))


def _written(size: SynthSize, name: str) -> Path:
    folder = cache_folder() / name
    if not (folder / "config.json").is_file():
        say(f"Making {name} in {folder} ...")
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_checkpoint(size, folder)
    return folder
