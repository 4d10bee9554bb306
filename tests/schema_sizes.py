"""Sizes of a model, counted from its schema and config."""

from __future__ import annotations

import math

from lowtide.config import ModelConfig
from lowtide.schemas import ModelSchema


def num_tensors_of(schema: ModelSchema) -> int:
    """In the published layout."""
    num_of_experts = sum(1 for layer in schema.moe_layers for _ in schema.expert_specs(layer))
    return len(schema.dense) + num_of_experts


def num_parameters_of(schema: ModelSchema) -> int:
    return schema.dense_elements + schema.expert_elements


def kv_elements_of(config: ModelConfig) -> int:
    """Return the number of cached elements of one token in all layers."""
    shapes = (layer.mixer.cache_shape for layer in config.layers if layer.mixer is not None)
    return sum(math.prod(shape) for shape in shapes if shape is not None)
