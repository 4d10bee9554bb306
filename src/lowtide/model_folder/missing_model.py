"""Messages about paths without a model: similar names, and the folder's contents."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator
from pathlib import Path

ENDINGS = (".gguf", ".safetensors", ".json", ".bin", ".pth", ".pt", ".ckpt", ".onnx")
"""Endings of files that are given as models."""

_MAX_NAMES = 10_000
_NEAR = 0.6
_MODELS_WITHIN = ("*.gguf", "*/config.json", "*/*.gguf", "snapshots/*/config.json")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pth", "*.pt")


def is_path(reference: str) -> bool:
    """Return True if a reference can only be a path, by its beginning, ending or depth."""
    begins = reference.startswith(("/", "./", "../", "~"))
    ends = reference.lower().endswith((*ENDINGS, "/"))
    return begins or ends or "\\" in reference or reference.count("/") > 1


def no_file_message(path: Path) -> str:
    """Say that there is no file at a path, with similar names."""
    first = next((p for p in (*reversed(path.parents), path) if not p.exists()), path)
    if first.is_symlink():
        return f"{first} is missing: its link leads to {first.readlink()}, where nothing is."
    if first != path:
        told = f"There is no file {path}: the folder {first} does not exist."
    else:
        told = f"There is no file or folder {path}."
    if not first.parent.is_dir():
        return told
    names = {name.lower(): name for name in _names(first.parent)}
    near = [names[n] for n in difflib.get_close_matches(first.name.lower(), names, 3, _NEAR)]
    if not near:
        return f"{told} Give a model's folder, a GGUF file, or org/name of the hub."
    return f"{told} Near: {', '.join(str(first.parent / name) for name in near)}."


def no_model_message(folder: Path) -> str:
    """Say what a folder without a model holds, and what a model is."""
    told = (
        f"{folder} holds no model: neither config.json, beside *.safetensors, nor a GGUF file. "
        "Give a model's folder, a GGUF file, or org/name of the hub."
    )
    weights = sorted(
        path.name for end in _WEIGHTS for path in itertools.islice(folder.glob(end), 4)
    )
    if weights:
        told += f" Beside {weights[0]} its config.json is missing: fetch the model's other files."
    found = sorted({_model_of(path) for path in itertools.islice(_models_within(folder), 20)})
    if found:
        told += f" Models within it: {', '.join(map(str, found[:4]))}."
    return told


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in itertools.islice(folder.iterdir(), _MAX_NAMES)]
    except OSError:  # not readable for this user
        return []


def _models_within(folder: Path) -> Iterator[Path]:
    for pattern in _MODELS_WITHIN:
        try:
            yield from folder.glob(pattern)
        except OSError:
            continue


def _model_of(found: Path) -> Path:
    return found.parent if found.name == "config.json" else found
