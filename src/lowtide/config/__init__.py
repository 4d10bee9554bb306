"""What a model is: `config.json` read into one typed, family-neutral `ModelConfig`.

Every value is checked where it is read, so the rest of the house may trust it. Imports no torch,
so that a refusal never waits for it.

    config = ModelConfig.load(folder, {"mask_token_id": 383})
    config.moe_shape, config.num_moe_layers, config.decoding
"""

from __future__ import annotations

from lowtide.config.families import supported_architectures
from lowtide.config.model import FAMILIES, DecodingDefaults, Family, ModelConfig
from lowtide.config.rope import Yarn
from lowtide.config.sizes import MAX_SIZE_BYTES, format_size, parse_size

__all__ = [
    "FAMILIES",
    "MAX_SIZE_BYTES",
    "DecodingDefaults",
    "Family",
    "ModelConfig",
    "Yarn",
    "format_size",
    "parse_size",
    "supported_architectures",
]
