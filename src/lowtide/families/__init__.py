"""One folder for each model family: reader and schema, the model, the sizes that can be made.

A family is added by its folder alone: `FAMILY` in its `__init__.py`, without torch, the model in
`model.py`, `sizes.json`. What families share is in `config`, `schemas` and `models`.

    families()["mixtral"].model(), families()["mixtral"].sizes()["tiny"]
"""

from __future__ import annotations

from lowtide.families.family import Family
from lowtide.families.registry import (
    families,
    gguf_architecture,
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
    "read_config",
    "read_config_in",
    "register",
    "supported_architectures",
    "unregister",
]
