"""Checkpoints that can be synthesised for a family: published constants and sizes, from JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True, slots=True)
class SynthSize:
    """One checkpoint that can be synthesised.

    config: contents of `config.json`.
    eos_token_id: the first of the special tokens, which end the vocabulary.
    max_shard_bytes: most bytes of tensors per file.
    hub_id: the published model of this size, if any.
    """

    config: Mapping[str, Any]
    eos_token_id: int
    max_shard_bytes: int
    hub_id: str | None = None


@cache
def read_sizes(family: str) -> Mapping[str, SynthSize]:
    """Read a family's `sizes.json`: a few MB, 1 or 2 GB, and the published dimensions."""
    path = resources.files(__package__).joinpath(family, "sizes.json")
    content = json.loads(path.read_text("utf-8"))
    return {name: _size(content["published"], size) for name, size in content["sizes"].items()}


def _size(published: Mapping[str, Any], size: Mapping[str, Any]) -> SynthSize:
    config = {**published, **size["config"]}
    eos_token_id = size.get("eos_token_id", config.get("eos_token_id"))
    return SynthSize(config, eos_token_id, size["max_shard_bytes"], size.get("hub_id"))
