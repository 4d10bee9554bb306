"""Where a model's weights lie: a schema held against a checkpoint's headers.

Everything that is needed is checked here, once, before any weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lowtide.checkpoint import Checkpoint, TensorEntry
from lowtide.core import IntArray
from lowtide.dtypes import ITEM_BYTES
from lowtide.errors import CheckpointError, UnsupportedError
from lowtide.schemas.schema import (
    ExpertLayout,
    ModelSchema,
    PartSource,
    TensorSpec,
)

MAX_GAP_BYTES = 4096
"""Parts this close in a file are read together: a page more costs less than a request more."""


class ExpertRange(NamedTuple):
    """One contiguous read, and where the parts begin in it: (0 gate, 1 up or 2 down, offset)."""

    file: int
    start: int  # bytes from the start of the file
    num_bytes: int
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """The byte ranges of every routed expert. Arrays are read-only.

    Layers are MoE layers, numbered from 0; the last axis is gate, up, down.
    """

    dtype: str  # as stored, of all expert weights: "BF16"
    files: IntArray  # [moe_layers, experts, 3], indices into Checkpoint.files
    offsets: IntArray  # [moe_layers, experts, 3], bytes from the start of the file
    part_bytes: tuple[int, int, int]  # as stored

    @property
    def expert_bytes(self) -> int:
        """Of one expert, as stored."""
        return sum(self.part_bytes)

    def ranges(self, layer: int, expert: int) -> list[ExpertRange]:
        """The reads that bring one expert, in file order; at most three, usually one."""
        files = self.files[layer, expert].tolist()
        offsets = self.offsets[layer, expert].tolist()
        ranges: list[ExpertRange] = []
        for file, offset, part in sorted(zip(files, offsets, range(3), strict=True)):
            end = offset + self.part_bytes[part]
            if ranges and _is_near(ranges[-1], file, offset):
                last = ranges[-1]
                parts = (*last.parts, (part, offset - last.start))
                ranges[-1] = ExpertRange(file, last.start, end - last.start, parts)
            else:
                ranges.append(ExpertRange(file, offset, end - offset, ((part, 0),)))
        return ranges


@dataclass(frozen=True, slots=True)
class WeightMap:
    """A model's weights: what is always loaded, and what comes and goes."""

    dense: Mapping[str, TensorEntry]  # by checkpoint name, in the order of the schema
    experts: ExpertTable


def bind_schema(schema: ModelSchema, checkpoint: Checkpoint) -> WeightMap:
    """Finds every tensor of `schema` in `checkpoint`; others are ignored.

    Raises CheckpointError for a tensor that is missing, has another shape or contradicts the
    config, UnsupportedError for a type that weights cannot be loaded from.
    """
    for name in schema.absent:
        if name in checkpoint.tensors:
            raise CheckpointError(
                f"The checkpoint has the tensor {name}, which its config.json has switched off; "
                "one of the two is wrong. A config override can switch it on."
            )
    dense = {spec.name: _find(spec, checkpoint) for spec in schema.dense}
    return WeightMap(dense, _expert_table(schema, checkpoint))


def assumed_weights(schema: ModelSchema, dtype: str) -> WeightMap:
    """Where the weights would lie in one published file of `dtype`, for a plan without shards.

    An expert's parts are adjacent in the order down, gate, up, as published files have them.
    """
    item_bytes = ITEM_BYTES[dtype]
    offset = 0
    dense: dict[str, TensorEntry] = {}
    for spec in schema.dense:
        num_bytes = spec.num_elements * item_bytes
        dense[spec.name] = TensorEntry(0, offset, num_bytes, dtype, spec.shape)
        offset += num_bytes
    gate, up, down = (part.part_elements * item_bytes for part in schema.layouts[0].parts)
    num_layers, num_experts = len(schema.moe_layers), schema.num_experts
    index = np.arange(num_layers * num_experts, dtype=np.int64).reshape(num_layers, num_experts)
    start = offset + index * (gate + up + down)
    offsets = np.stack([start + down, start + down + gate, start], axis=-1)
    files = np.zeros_like(offsets)
    files.flags.writeable = offsets.flags.writeable = False
    return WeightMap(dense, ExpertTable(dtype, files, offsets, (gate, up, down)))


def _is_near(last: ExpertRange, file: int, offset: int) -> bool:
    return last.file == file and offset - (last.start + last.num_bytes) <= MAX_GAP_BYTES


def _find(spec: TensorSpec, checkpoint: Checkpoint) -> TensorEntry:
    entry = checkpoint.tensors.get(spec.name)
    if entry is None and spec.other_name is not None:
        entry = checkpoint.tensors.get(spec.other_name)
    if entry is None:
        raise CheckpointError(
            f"The checkpoint has no tensor {spec.name} of shape {list(spec.shape)} among its "
            f"{len(checkpoint.tensors)}; config.json asks for it."
        )
    if entry.shape != spec.shape:
        raise CheckpointError(
            f"Tensor {spec.name} has shape {list(entry.shape)}; config.json makes it "
            f"{list(spec.shape)}."
        )
    supported = tuple(ITEM_BYTES) if spec.dtype is None else (spec.dtype,)
    if entry.dtype not in supported:
        raise UnsupportedError(
            f"Tensor {spec.name} is of type {entry.dtype}; supported: {', '.join(supported)}."
        )
    return entry


def _expert_table(schema: ModelSchema, checkpoint: Checkpoint) -> ExpertTable:
    layout, layers = _detect(schema, checkpoint), schema.moe_layers
    dtype = _find(layout.parts[0].spec(layers[0], 0), checkpoint).dtype
    # Found before memory is taken: a config may claim more experts than a disk can hold.
    _find(layout.parts[2].spec(layers[-1], schema.num_experts - 1), checkpoint)
    files = np.empty((len(layers), schema.num_experts, 3), np.int64)
    offsets = np.empty_like(files)
    for row, layer in enumerate(layers):
        for part, source in enumerate(layout.parts):
            places = _places(source, layer, dtype, schema.num_experts, checkpoint)
            files[row, :, part], offsets[row, :, part] = places
    files.flags.writeable = offsets.flags.writeable = False
    gate, up, down = (source.part_elements * ITEM_BYTES[dtype] for source in layout.parts)
    return ExpertTable(dtype, files, offsets, (gate, up, down))


def _detect(schema: ModelSchema, checkpoint: Checkpoint) -> ExpertLayout:
    layer = schema.moe_layers[0]
    for layout in schema.layouts:
        if all(source.spec(layer, 0).name in checkpoint.tensors for source in layout.parts):
            return layout
    name = schema.layouts[0].parts[0].spec(layer, 0).name
    known = "; ".join(layout.name for layout in schema.layouts)
    raise CheckpointError(
        f"The checkpoint has no experts of layer {layer} in any known layout: no tensor {name}. "
        f"Known: {known}."
    )


def _places(
    source: PartSource, layer: int, dtype: str, num_experts: int, checkpoint: Checkpoint
) -> tuple[list[int], list[int]]:
    """File and offset in bytes of this part of every expert."""
    files, offsets = [], []
    previous: TensorSpec | None = None
    for expert in range(num_experts):
        spec = source.spec(layer, expert)
        if spec != previous:  # a stacked tensor is looked up once
            entry, previous = _find_expert(spec, dtype, checkpoint), spec
        files.append(entry.file)
        offsets.append(entry.offset + source.first_element(expert) * ITEM_BYTES[dtype])
    return files, offsets


def _find_expert(spec: TensorSpec, dtype: str, checkpoint: Checkpoint) -> TensorEntry:
    entry = _find(spec, checkpoint)
    if entry.dtype != dtype:
        raise UnsupportedError(
            f"Tensor {spec.name} is of type {entry.dtype}, but other experts are {dtype}; "
            "experts must be of one type."
        )
    return entry
