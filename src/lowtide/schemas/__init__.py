"""Tensor names and shapes of each family as data, and their lookup in a checkpoint.

Without torch: the loader, the planner and the synthesiser read the same schema.

    weights = bind(config, Checkpoint.open(folder))
    weights.dense["lm_head.weight"], weights.experts.ranges(layer=0, expert=7)
"""

from __future__ import annotations

from lowtide.config import ModelConfig
from lowtide.errors import CheckpointError
from lowtide.families.registry import families
from lowtide.formats.plain import ITEM_BYTES, SAFETENSORS_NAME
from lowtide.model_folder.checkpoint import Checkpoint
from lowtide.model_folder.extra_layers import warn_of_extra_layers
from lowtide.schemas.packed import with_packed
from lowtide.schemas.quantised import with_quantised
from lowtide.schemas.schema import ExpertStorage, ModelSchema, PartSource, SlotTarget, TensorSpec
from lowtide.schemas.text_names import with_text_names
from lowtide.schemas.weights import (
    ExpertRange,
    ExpertTable,
    WeightMap,
    assumed_weights,
    bind_schema,
)

__all__ = [
    "ExpertStorage",
    "ExpertRange",
    "ExpertTable",
    "ModelSchema",
    "PartSource",
    "SlotTarget",
    "TensorSpec",
    "WeightMap",
    "as_stored",
    "assume",
    "bind",
    "model_schema",
    "weight_bytes",
    "stored_matrices",
]


def model_schema(config: ModelConfig) -> ModelSchema:
    """Return the schema of every tensor that a model of this config needs."""
    return families()[config.family].schema(config)


def as_stored(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """Return the config of a model whose family is stored in several ways, as it is stored here."""
    stored = families()[config.family].as_stored
    return config if stored is None else stored(config, checkpoint.tensors)


def stored_matrices(config: ModelConfig, checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with all matrices under their models' names.

    That is what is packed, or several tensors, or a text model's within a larger one.

    Raises CheckpointError, UnsupportedError as `with_packed` and `with_quantised` do.
    """
    schema = model_schema(config)
    checkpoint = with_text_names(checkpoint, f"{schema.names.layers}.")
    return with_quantised(with_packed(checkpoint, schema), schema, config.quantisation)


def bind(config: ModelConfig, checkpoint: Checkpoint) -> WeightMap:
    """Locate the model's weights in `checkpoint`.

    Tensors that the model does not need are ignored, whole layers with a warning. Raises
    CheckpointError for a tensor that is missing, has another shape or contradicts the config,
    UnsupportedError for a type that weights cannot be loaded from.
    """
    schema = model_schema(config)
    warn_of_extra_layers(checkpoint.tensors, f"{schema.names.layers}.", config.num_layers)
    return bind_schema(schema, checkpoint)


def assume(config: ModelConfig) -> WeightMap:
    """Locate the weights in an assumed checkpoint, for a plan from config.json alone.

    Raises CheckpointError for weights rounded by other tools: only headers tell which ones they
    are.
    """
    if config.quantisation is not None:
        raise CheckpointError(
            f"config.json has a quantization_config ({config.quantisation.method}) and there are "
            "no weights: which of them are in that format is told by their files' headers."
        )
    return assumed_weights(model_schema(config), SAFETENSORS_NAME[config.dtype])


def weight_bytes(config: ModelConfig, dtype: str) -> tuple[int, int]:
    """Return the bytes of the dense weights and of all routed experts if stored in `dtype`.

    From the config alone, for a plan before any shard is here; `dtype` as in `ModelConfig.dtype`.
    """
    item_bytes = ITEM_BYTES[SAFETENSORS_NAME[dtype]]
    schema = model_schema(config)
    return schema.dense_elements * item_bytes, schema.expert_elements * item_bytes
