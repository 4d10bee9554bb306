"""Where a model's weights lie: a schema held against a checkpoint's headers.

Everything that is needed is checked here, once, before any weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lowtide.core import IntArray
from lowtide.dtypes import ITEM_BYTES, PACKED_DTYPE
from lowtide.errors import CheckpointError, UnsupportedError
from lowtide.model_folder.checkpoint import Checkpoint, TensorEntry
from lowtide.schemas.schema import (
    ExpertLayout,
    ModelSchema,
    PartSource,
    SlotTarget,
    TensorSpec,
)

MAX_GAP_BYTES = 4096
"""Parts this close in a file are read together: a page more costs less than a request more."""


class ExpertRange(NamedTuple):
    """One contiguous read, and where the parts begin in it: (stored part, offset)."""

    file: int
    start: int  # bytes from the start of the file
    num_bytes: int
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """The byte ranges of every routed expert. Arrays are read-only.

    Layers are MoE layers, numbered from 0; the last axis is the stored parts: gate, up, down, or
    those of an `ExpertLayout` with `targets`.
    """

    dtype: str  # as stored, of all expert weights but packed ones: "BF16"
    files: IntArray  # [moe_layers, experts, parts], indices into Checkpoint.files
    offsets: IntArray  # [moe_layers, experts, parts], bytes from the start of the file
    part_bytes: tuple[int, ...]  # as stored
    targets: tuple[SlotTarget | None, ...] | None = None  # see ExpertLayout

    @property
    def expert_bytes(self) -> int:
        """Of one expert, as stored."""
        return sum(self.part_bytes)

    def ranges(self, layer: int, expert: int) -> list[ExpertRange]:
        """The reads that bring one expert, in file order; usually one."""
        files = self.files[layer, expert].tolist()
        offsets = self.offsets[layer, expert].tolist()
        ranges: list[ExpertRange] = []
        for file, offset, part in sorted(zip(files, offsets, range(len(files)), strict=True)):
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

    An expert's parts are adjacent in the order of their names, as published files have them.
    """
    item_bytes = ITEM_BYTES[dtype]
    offset = 0
    dense: dict[str, TensorEntry] = {}
    for spec in schema.dense:
        num_bytes = spec.num_elements * item_bytes
        dense[spec.name] = TensorEntry(0, offset, num_bytes, dtype, spec.shape)
        offset += num_bytes
    layout = schema.layouts[0]
    part_bytes = tuple(_stored_bytes(source, dtype) for source in layout.parts)
    num_layers, num_experts = len(schema.moe_layers), schema.num_experts
    index = np.arange(num_layers * num_experts, dtype=np.int64).reshape(num_layers, num_experts)
    offsets = np.empty((num_layers, num_experts, len(part_bytes)), np.int64)
    start = offset + index * sum(part_bytes)
    for part in sorted(range(len(part_bytes)), key=lambda part: layout.parts[part].template):
        offsets[:, :, part] = start
        start = start + part_bytes[part]
    files = np.zeros_like(offsets)
    files.flags.writeable = offsets.flags.writeable = False
    return WeightMap(dense, ExpertTable(dtype, files, offsets, part_bytes, layout.targets))


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
    unpacked = next(source for source in layout.parts if source.dtype is None)
    dtype = _find(unpacked.spec(layers[0], 0), checkpoint).dtype
    # Found before memory is taken: a config may claim more experts than a disk can hold.
    _find(layout.parts[-1].spec(layers[-1], schema.num_experts - 1), checkpoint)
    files = np.empty((len(layers), schema.num_experts, len(layout.parts)), np.int64)
    offsets = np.empty_like(files)
    for row, layer in enumerate(layers):
        for part, source in enumerate(layout.parts):
            places = _places(source, layer, dtype, schema.num_experts, checkpoint)
            files[row, :, part], offsets[row, :, part] = places
    files.flags.writeable = offsets.flags.writeable = False
    part_bytes = tuple(_stored_bytes(source, dtype) for source in layout.parts)
    return ExpertTable(dtype, files, offsets, part_bytes, layout.targets)


def _stored_bytes(source: PartSource, dtype: str) -> int:
    """Of one part of one expert, in a checkpoint whose expert weights are of `dtype`."""
    return source.part_elements * _item_bytes(source, dtype)


def _item_bytes(source: PartSource, dtype: str) -> int:
    return 1 if source.dtype == PACKED_DTYPE else ITEM_BYTES[dtype]


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
    item_bytes = _item_bytes(source, dtype)
    for expert in range(num_experts):
        spec = source.spec(layer, expert)
        if spec != previous:  # a stacked tensor is looked up once
            entry, previous = _find_expert(spec, source.dtype or dtype, checkpoint), spec
        files.append(entry.file)
        offsets.append(entry.offset + source.first_element(expert) * item_bytes)
    return files, offsets


def _find_expert(spec: TensorSpec, dtype: str, checkpoint: Checkpoint) -> TensorEntry:
    entry = _find(spec, checkpoint)
    if entry.dtype != dtype:
        raise UnsupportedError(
            f"Tensor {spec.name} is of type {entry.dtype}, but other experts are {dtype}; "
            "experts must be of one type."
        )
    return entry
