"""Configuration of a local model, from a folder or a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lowtide.config import ModelConfig
from lowtide.core import NOTHING
from lowtide.families import read_config_in
from lowtide.model_folder import tokenizer
from lowtide.model_folder.gguf_file import is_gguf


def load_config(path: Path, overrides: Mapping[str, object] = NOTHING) -> ModelConfig:
    """Load a model's configuration: a folder's `config.json`, or a GGUF file's metadata.

    Raises as `read_config_in` and `GgufModel.open` do.
    """
    if not is_gguf(path):
        return read_config_in(path, overrides)
    from lowtide.model_folder.gguf_model import GgufModel  # with every family

    return GgufModel.open(path).config(overrides)


def has_chat_template(path: Path) -> bool:
    """Return True if a model folder or a GGUF file has a chat template. Raises CheckpointError."""
    if not is_gguf(path):
        return tokenizer.has_chat_template(path)
    from lowtide.model_folder.gguf_model import GgufModel  # with every family

    found = GgufModel.open(path).tokenizer()
    return found is not None and found.has_chat_template
