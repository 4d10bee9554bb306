"""Model families: one folder each with config reader, schema, model and sizes.

A family is added by its folder alone: `FAMILY` in its `__init__.py`, without torch, the model in
`model.py`, and `sizes.json`. Shared parts are in `config`, `schemas` and `models`.

    families()["mixtral"].model(), families()["mixtral"].sizes()["tiny"]
"""

from __future__ import annotations

from lowtide.families.family import Family
from lowtide.families.registry import (
    families,
    gguf_architecture,
    gguf_architectures,
    read_config,
    read_config_in,
    register,
    supported_architectures,
    unregister,
)
from lowtide.families.sizes import SynthSize

__all__ = [
    "Family",
    "SynthSize",
    "families",
    "gguf_architecture",
    "gguf_architectures",
    "read_config",
    "read_config_in",
    "register",
    "supported_architectures",
    "unregister",
]
