"""The synthetic models that are measured, made once and kept."""

from __future__ import annotations

import os
from pathlib import Path

from common.record import say
from lowtide.errors import UsageError
from lowtide.model_writing.pack import pack
from lowtide.model_writing.synth import synth
from lowtide.plan import OWN_FORMAT


def model_folder(given: Path | None, size: str, family: str = "llada2") -> Path:
    """The folder to measure: `given`, or a `synth` of `family` and `size` in the cache.

    Either is made when it does not exist yet; `synth` checks the free disk first. Raises
    UsageError for a folder that is not a model's.
    """
    folder = given if given is not None else cache_folder() / f"{family}-{size}"
    if not folder.exists():
        say(f"Making `synth {family} --size {size}` in {folder} ...")
        folder.parent.mkdir(parents=True, exist_ok=True)
        synth(family, size, folder)
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} has no config.json; name a model's folder or a new one.")
    return folder


def stored_as(folder: Path, weights: str) -> tuple[Path, str]:
    """A model in other weights: its folder, and the `activations` that it is computed with.

    weights: `own`, or a format that `pack` writes, which is done once, beside `folder`, and kept;
    with `+int8` behind it where rows are rounded to 8 bits.
    """
    name, _, activations = weights.partition("+")
    if name == OWN_FORMAT:
        return folder, activations or OWN_FORMAT
    packed = folder.parent / f"{folder.name}-{name}"
    if not (packed / "config.json").is_file():
        say(f"Packing {folder} into {packed} ...")
        pack(folder, packed, format=name)
    return packed, activations or OWN_FORMAT


def cache_folder() -> Path:
    """Where benchmarks keep models: `$XDG_CACHE_HOME/lowtide/benchmarks` or below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lowtide" / "benchmarks"


def demos() -> list[str]:
    """The demo models, and the deep one."""
    return ["demo:autoregressive", "demo:diffusion", *deep_demos()]


def deep_demos() -> list[str]:
    """The demo of 12 layers, where `make deep-demo` has trained it."""
    deep = cache_folder() / "demo-12-layers"
    return [str(deep)] if deep.exists() else []
