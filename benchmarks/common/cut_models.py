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
from lowtide.model_writing.synth import write_checkpoint
from lowtide.model_writing.synth_weights import tensors_of


def cut_model(family: str, max_bytes: int) -> Path:
    """A `synth` of as many published layers as there is room for, made once and kept.

    Raises UsageError where not even two layers are as small.
    """
    size = families()[family].sizes()["full"]
    fewer = range(size.config["num_hidden_layers"] + 1)
    num_layers = bisect_right(fewer, max_bytes, lo=2, key=lambda n: _cut_bytes(size, n)) - 1
    if num_layers < 2:
        raise UsageError(f"Two layers of {family} are more than {max_bytes} bytes.")
    name = f"{family}-{num_layers}-layers"
    return _written(_with_layers(size, num_layers), name)


def model_of_layers(family: str, num_layers: int, num_words: int | None = None) -> Path:
    """A `synth` of the first so many published layers, made once and kept.

    num_words: of its vocabulary, by default the published one.
    """
    size, name = families()[family].sizes()["full"], f"{family}-{num_layers}-layers"
    if num_words is not None:
        size, name = _with_words(size, num_words), f"{name}-{num_words}-words"
    return _written(_with_layers(size, num_layers), name)


def weight_bytes(folder: Path) -> int:
    """Of a model's files."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


_OF_LAYERS = ("moe_layer_freq", "layer_types")


def _with_words(size: SynthSize, num_words: int) -> SynthSize:
    """The same with another vocabulary, which ends in as many special tokens."""
    shift = num_words - size.config["vocab_size"]
    config = {
        name: value + shift if name.endswith("_token_id") and isinstance(value, int) else value
        for name, value in size.config.items()
    }
    config["vocab_size"] = num_words
    return replace(size, config=config, eos_token_id=size.eos_token_id + shift)


def _with_layers(size: SynthSize, num_layers: int) -> SynthSize:
    config: Mapping[str, Any] = {
        name: value[:num_layers] if isinstance(value, list) and name in _OF_LAYERS else value
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
