"""Tensors of folders written by `lowtide pack`, under the names that models use.

A matrix NAME in a format of 8 or 4 bits is a tensor `NAME.q4` of bytes, [.., rows, bytes of a row].
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from lowtide.errors import CheckpointError
from lowtide.formats import formats
from lowtide.model_folder.checkpoint import Checkpoint, TensorEntry
from lowtide.schemas.schema import ModelSchema, TensorSpec

PACKED = ("q8", "q4")
"""Formats that end the names of packed tensors."""

BYTES_DTYPE = "U8"


def packed_name(name: str, format_name: str) -> str:
    """Return a packed tensor's name."""
    return f"{name}.{format_name}"


def packed_shape(shape: tuple[int, ...], format_name: str) -> tuple[int, ...]:
    """Return a packed tensor's shape, its last dimension in bytes."""
    return *shape[:-1], formats()[format_name].for_rows(shape[-1]).block_bytes[0]


def with_packed(checkpoint: Checkpoint, schema: ModelSchema) -> Checkpoint:
    """Return the checkpoint with packed tensors under the schema's names, shapes and formats.

    Raises CheckpointError for a tensor of another shape than the schema's.
    """
    endings = tuple(f".{name}" for name in PACKED)
    if not any(name.endswith(endings) for name in checkpoint.tensors):
        return checkpoint
    tensors = dict(checkpoint.tensors)
    for spec in specs_of(schema):
        for format_name in PACKED:
            entry = tensors.pop(packed_name(spec.name, format_name), None)
            if entry is not None:
                tensors[spec.name] = _unpacked_entry(entry, spec, format_name)
    return Checkpoint(checkpoint.files, tensors)


def specs_of(schema: ModelSchema) -> Iterator[TensorSpec]:
    """Yield all tensors that a model may have, in every known storage of its experts."""
    yield from schema.dense
    for storage in schema.storages:
        for layer in schema.moe_layers:
            for source in storage.parts:
                for expert in range(1 if source.num_stacked else schema.num_experts):
                    yield source.spec(layer, expert)


def _unpacked_entry(entry: TensorEntry, spec: TensorSpec, format_name: str) -> TensorEntry:
    wanted = packed_shape(spec.shape, format_name)
    if entry.dtype != BYTES_DTYPE or entry.shape != wanted or entry.num_bytes != math.prod(wanted):
        raise CheckpointError(
            f"Tensor {packed_name(spec.name, format_name)} is of type {entry.dtype} and shape "
            f"{list(entry.shape)}; config.json makes it {BYTES_DTYPE} {list(wanted)}. Pack the "
            "model again."
        )
    return entry._replace(dtype=format_name, shape=spec.shape)
