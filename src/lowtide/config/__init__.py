"""Model configuration: `config.json` read into one typed, family-neutral `ModelConfig`.

Every value is checked where it is read, so other rooms may trust it. Imports no torch, so that a
refusal never waits for it.

    config = families.read_config_in(folder, {"mask_token_id": 383})
    config.attention.head_dim, config.moe.num_experts, config.moe_shape, config.decoding
"""

from __future__ import annotations

from lowtide.config.decoding import Blocks, Canvas, Causal, Decoding, DecodingDefaults
from lowtide.config.layers import LayerSpec, SideBySide
from lowtide.config.model import ModelConfig, Multipliers, Published
from lowtide.config.rope import Rope, Yarn
from lowtide.config.sizes import MAX_SIZE_BYTES, format_size, parse_size
from lowtide.config.specs import (
    AttentionSpec,
    DeltaNetSpec,
    DenseSpec,
    ExpertSpec,
    LatentAttentionSpec,
    ShortConvSpec,
    StateArray,
)

__all__ = [
    "MAX_SIZE_BYTES",
    "AttentionSpec",
    "Blocks",
    "Canvas",
    "Causal",
    "Decoding",
    "DecodingDefaults",
    "DeltaNetSpec",
    "DenseSpec",
    "ExpertSpec",
    "LatentAttentionSpec",
    "LayerSpec",
    "ModelConfig",
    "Multipliers",
    "Published",
    "Rope",
    "ShortConvSpec",
    "SideBySide",
    "StateArray",
    "Yarn",
    "format_size",
    "parse_size",
]
