"""Location of a model's weights: its schema matched with a checkpoint's headers.

Everything needed is checked here, once, before any weight is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lowtide.core import IntArray
from lowtide.errors import CheckpointError
from lowtide.files.regular_file import FETCH_AGAIN
from lowtide.formats import MatrixFormat, format_of, formats
from lowtide.formats.mixed import mixed
from lowtide.formats.plain import ITEM_BYTES
from lowtide.model_folder.checkpoint import Checkpoint, TensorEntry
from lowtide.schemas.schema import ExpertStorage, ModelSchema, SlotTarget, TensorSpec
from lowtide.schemas.tensor_lookup import PartKind, find, find_expert, find_parts

MAX_GAP_BYTES = 4096
"""Largest gap between parts read together: a page more costs less than a request more."""


class ExpertRange(NamedTuple):
    """One contiguous read, and the parts in it as (stored part, offset)."""

    file: int
    start: int  # bytes from the start of the file
    num_bytes: int
    parts: tuple[tuple[int, int], ...]


class ExpertTensor(NamedTuple):
    """A tensor that holds a stored part of one expert, or of all experts of a layer in order."""

    spec: TensorSpec
    layer: int  # of MoE layers
    expert: int  # the first
    part: int  # the first, of those fused


class StoredLayer(NamedTuple):
    """Format and bytes of each stored part, of a layer's experts or of a differing one."""

    formats: tuple[MatrixFormat, ...]
    part_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """The byte ranges of every routed expert, in read-only arrays.

    Layers are MoE layers, numbered from 0; the last axis is the stored parts: gate, up, down, or
    those of an `ExpertStorage` with `targets`.
    """

    layers: tuple[StoredLayer, ...]
    files: IntArray  # [moe_layers, experts, parts], indices into Checkpoint.files
    offsets: IntArray  # [moe_layers, experts, parts], bytes from the start of the file
    targets: tuple[SlotTarget | None, ...] | None = None  # see ExpertStorage
    templates: tuple[str, ...] = ()  # of stored parts' names, or of those of their matrices
    numbers: tuple[int, ...] = ()  # of the layers, as names count them
    odd: Mapping[tuple[int, int], StoredLayer] = field(default_factory=dict)
    """Experts, by (layer, expert), stored differently from the first of their layer."""

    @classmethod
    def empty(cls) -> ExpertTable:
        """Return the table of a model without experts."""
        nothing = np.empty((0, 0, 0), np.int64)
        return cls((), nothing, nothing)

    @property
    def largest_expert_bytes(self) -> int:
        """Stored bytes of the largest expert."""
        return max(sum(each.part_bytes) for each in (*self.layers, *self.odd.values()))

    @property
    def formats(self) -> set[MatrixFormat]:
        """Formats of all stored parts."""
        return {each for stored in (*self.layers, *self.odd.values()) for each in stored.formats}

    def stored(self, layer: int, expert: int) -> StoredLayer:
        """Return the storage of an expert."""
        return self.odd.get((layer, expert), self.layers[layer])

    def name(self, layer: int, expert: int, part: int) -> str:
        """Return the model's name of a stored part's tensor, or of the matrix that it begins."""
        return self.templates[part].format(layer=self.numbers[layer], expert=expert)

    def kept(self, has_gpu: bool = False) -> list[tuple[MatrixFormat | None, ...]]:
        """List, per layer, the formats in which a slot's first parts are kept as stored.

        None means unpacked to the compute dtype.
        """
        found: list[dict[tuple[MatrixFormat | None, ...], None]] = []
        for layer in self.layers:
            kept = self._kept_of(layer.formats)
            found.append({_kept_on_gpu(kept) if has_gpu else kept: None})
        for (number, _), stored in self.odd.items():
            kept = self._kept_of(stored.formats)
            found[number][_kept_on_gpu(kept) if has_gpu else kept] = None
        return [_together(tuple(each), has_gpu) for each in found]

    def ranges(self, layer: int, expert: int) -> list[ExpertRange]:
        """Return the reads that fetch one expert, in file order; usually one."""
        files = self.files[layer, expert].tolist()
        offsets = self.offsets[layer, expert].tolist()
        part_bytes = self.stored(layer, expert).part_bytes
        ranges: list[ExpertRange] = []
        for file, offset, part in sorted(zip(files, offsets, range(len(files)), strict=True)):
            end = offset + part_bytes[part]
            if ranges and _is_near(ranges[-1], file, offset):
                last = ranges[-1]
                parts = (*last.parts, (part, offset - last.start))
                ranges[-1] = ExpertRange(file, last.start, end - last.start, parts)
            else:
                ranges.append(ExpertRange(file, offset, end - offset, ((part, 0),)))
        return ranges

    def _kept_of(self, stored: Sequence[MatrixFormat]) -> tuple[MatrixFormat | None, ...]:
        if self.targets is None:
            return tuple(each.kept for each in stored)
        by_part: dict[int, MatrixFormat | None] = {}
        for target, each in zip(self.targets, stored, strict=True):
            if target is not None:
                is_split = target.is_transposed and each.block_size > 1
                parts = range(target.first, target.first + target.num_parts)
                by_part |= dict.fromkeys(parts, None if is_split else each.kept)
        return tuple(by_part.get(part) for part in range(max(by_part) + 1))


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Location of a model's weights: dense ones, always loaded, and experts."""

    dense: Mapping[str, TensorEntry]  # by checkpoint name, in the order of the schema
    experts: ExpertTable
    unloaded_bytes: int = 0  # of tensors that the model does not need


def bind_schema(schema: ModelSchema, checkpoint: Checkpoint) -> WeightMap:
    """Locate every tensor of `schema` in `checkpoint`; others are ignored.

    Raises CheckpointError for a tensor that is missing, has another shape or contradicts the
    config, UnsupportedError for a type that weights cannot be loaded from.
    """
    for name in schema.absent:
        if name in checkpoint.tensors:
            raise CheckpointError(
                f"The checkpoint has the tensor {name}, which its config.json has switched off; "
                "one of the two is wrong. A config override can switch it on."
            )
    dense = {spec.name: find(spec, checkpoint) for spec in schema.dense}
    if not schema.storages:
        return WeightMap(dense, ExpertTable.empty(), _unloaded_bytes(schema, checkpoint, set()))
    table = _expert_table(schema, checkpoint)
    of_experts = {each.spec.name for each in expert_tensors(schema, checkpoint)}
    return WeightMap(dense, table, _unloaded_bytes(schema, checkpoint, of_experts))


def assumed_weights(schema: ModelSchema, dtype: str) -> WeightMap:
    """Locate the weights in one assumed file of `dtype`, for a plan without shards.

    An expert's parts are adjacent in the order of their names, as in published files.
    """
    item_bytes = ITEM_BYTES[dtype]
    offset = 0
    dense: dict[str, TensorEntry] = {}
    for spec in schema.dense:
        num_bytes = spec.num_elements * item_bytes
        dense[spec.name] = TensorEntry(0, offset, num_bytes, dtype, spec.shape)
        offset += num_bytes
    if not schema.storages:
        return WeightMap(dense, ExpertTable.empty())
    storage = schema.storages[0]
    # Tensors of a given type hold bytes.
    part_bytes = tuple(
        source.part_elements * (item_bytes if source.dtype is None else 1)
        for source in storage.parts
    )
    num_layers, num_experts = len(schema.moe_layers), schema.num_experts
    index = np.arange(num_layers * num_experts, dtype=np.int64).reshape(num_layers, num_experts)
    offsets = np.empty((num_layers, num_experts, len(part_bytes)), np.int64)
    start = offset + index * sum(part_bytes)
    for part in sorted(range(len(part_bytes)), key=lambda part: storage.parts[part].template):
        offsets[:, :, part] = start
        start = start + part_bytes[part]
    files = np.zeros_like(offsets)
    files.flags.writeable = offsets.flags.writeable = False
    layer = StoredLayer(_formats(storage, [dtype] * len(storage.parts)), part_bytes)
    return WeightMap(dense, ExpertTable((layer,) * num_layers, files, offsets, storage.targets))


def expert_tensors(schema: ModelSchema, checkpoint: Checkpoint) -> Iterator[ExpertTensor]:
    """Yield the tensors that hold the routed experts in `checkpoint`.

    Raises CheckpointError if they are missing.
    """
    storage = _detect(schema, checkpoint)
    seen = set()
    for number, layer in enumerate(schema.moe_layers):
        for part, source in enumerate(storage.parts):
            for expert in range(1 if source.num_stacked else schema.num_experts):
                spec = source.spec(layer, expert)
                if spec.name not in seen:
                    seen.add(spec.name)
                    yield ExpertTensor(spec, number, expert, _slot_part(storage, part))


def _unloaded_bytes(schema: ModelSchema, checkpoint: Checkpoint, of_experts: set[str]) -> int:
    loaded = of_experts.union(*((spec.name, spec.other_name) for spec in schema.dense))
    return sum(each.num_bytes for name, each in checkpoint.tensors.items() if name not in loaded)


def _kept_on_gpu(parts: Sequence[MatrixFormat | None]) -> tuple[MatrixFormat | None, ...]:
    """Keep only formats with GPU kernels, and gate and up only in one common format."""
    gate, up, *rest = (None if each is None or each.is_of_host else each for each in parts)
    return (gate, up, *rest) if gate is up else (None, None, *rest)


def _together(
    kinds: Sequence[tuple[MatrixFormat | None, ...]], has_gpu: bool
) -> tuple[MatrixFormat | None, ...]:
    """Combine the formats of differing experts: a part is kept if all of them keep it.

    Layers with the same set of formats get the same result, in any order.
    """
    parts = []
    for variants in zip(*kinds, strict=True):
        known = sorted({each for each in variants if each is not None}, key=lambda each: each.name)
        is_kept = None not in variants and not (has_gpu and len(known) > 1)
        parts.append((known[0] if len(known) == 1 else mixed(tuple(known))) if is_kept else None)
    return tuple(parts)


def _is_near(last: ExpertRange, file: int, offset: int) -> bool:
    return last.file == file and offset - (last.start + last.num_bytes) <= MAX_GAP_BYTES


def _expert_table(schema: ModelSchema, checkpoint: Checkpoint) -> ExpertTable:
    storage, layers = _detect(schema, checkpoint), schema.moe_layers
    # Found before memory is taken: a config may claim more experts than a disk can hold.
    find(storage.parts[-1].spec(layers[-1], schema.num_experts - 1), checkpoint)
    first = [checkpoint.tensors[each.spec(layers[0], 0).name] for each in storage.parts]
    if any(entry.tensors for entry in first):
        return _rounded_table(schema, storage, first, checkpoint)
    files = np.empty((len(layers), schema.num_experts, len(storage.parts)), np.int64)
    offsets = np.empty_like(files)
    stored: list[StoredLayer] = []
    odd: dict[tuple[int, int], StoredLayer] = {}
    for row, layer in enumerate(layers):
        found = [
            find_parts(source, layer, schema.num_experts, checkpoint) for source in storage.parts
        ]
        for part, each in enumerate(found):
            files[row, :, part], offsets[row, :, part] = each.files, each.offsets
        first_kinds, *kinds = zip(*(each.kinds for each in found), strict=True)
        stored.append(_stored(storage, first_kinds))
        for expert, own in enumerate(kinds, 1):
            if own != first_kinds:
                odd[row, expert] = _stored(storage, own)
    files.flags.writeable = offsets.flags.writeable = False
    names = tuple(source.template for source in storage.parts), layers
    return ExpertTable(tuple(stored), files, offsets, storage.targets, *names, odd)


def _stored(storage: ExpertStorage, kinds: Sequence[PartKind]) -> StoredLayer:
    """Make a `StoredLayer`; kinds: of an expert's stored parts."""
    formats_of = _formats(storage, [each.dtype for each in kinds])
    return StoredLayer(formats_of, tuple(each.part_bytes for each in kinds))


def _rounded_table(
    schema: ModelSchema,
    storage: ExpertStorage,
    first: Sequence[TensorEntry],
    checkpoint: Checkpoint,
) -> ExpertTable:
    """Make the table of experts whose matrices are several tensors, each a stored part.

    first: the entries of layer 0's expert 0; all others must be stored alike.
    """
    layers, tensors = schema.moe_layers, [entry.tensors or (entry,) for entry in first]
    num_parts = sum(map(len, tensors))
    places = np.empty((len(layers), schema.num_experts, num_parts, 2), np.int64)
    for row, layer in enumerate(layers):
        for expert in range(schema.num_experts):
            found = []
            for source, like in zip(storage.parts, first, strict=True):
                entry = find_expert(source.spec(layer, expert), like.dtype, checkpoint)
                found += [(each.file, each.offset) for each in entry.tensors or (entry,)]
            places[row, expert] = found
    targets: list[SlotTarget | None] = []
    formats_of: list[MatrixFormat] = []
    templates: list[str] = []
    for part, own in enumerate(tensors):
        start = len(targets)
        others = tuple(range(start + 1, start + len(own)))
        targets += [SlotTarget(_slot_part(storage, part), others=others), *[None] * len(others)]
        formats_of += [format_of(first[part].dtype)] * len(own)
        templates += [storage.parts[part].template] * len(own)
    files, offsets = (np.ascontiguousarray(places[..., i]) for i in range(2))
    files.flags.writeable = offsets.flags.writeable = False
    part_bytes = tuple(each.num_bytes for own in tensors for each in own)
    stored = StoredLayer(tuple(formats_of), part_bytes)
    all_layers = (stored,) * len(layers)
    return ExpertTable(all_layers, files, offsets, tuple(targets), tuple(templates), layers)


def _slot_part(storage: ExpertStorage, part: int) -> int:
    """Return the part of a slot that a stored part is."""
    target = None if storage.targets is None else storage.targets[part]
    return part if target is None else target.first


def _formats(storage: ExpertStorage, dtypes: Sequence[str]) -> tuple[MatrixFormat, ...]:
    """Return the format of each stored part: the one named by its target, or its tensor's type."""
    named: dict[int, str] = {}
    for part, target in enumerate(storage.targets or ()):
        if target is not None and target.format is not None:
            named |= dict.fromkeys((part, *target.others), target.format)
    return tuple(
        formats()[named[part]]
        if part in named
        else format_of(dtype).for_rows(storage.parts[part].part_shape[-1])
        for part, dtype in enumerate(dtypes)
    )


def _detect(schema: ModelSchema, checkpoint: Checkpoint) -> ExpertStorage:
    layer = schema.moe_layers[0]
    for storage in schema.storages:
        if all(source.spec(layer, 0).name in checkpoint.tensors for source in storage.parts):
            return storage
    name = schema.storages[0].parts[0].spec(layer, 0).name
    known = "; ".join(storage.name for storage in schema.storages)
    raise CheckpointError(
        f"The checkpoint has no experts of layer {layer} in any known layout: no tensor {name}. "
        f"Known: {known}. {FETCH_AGAIN.capitalize()}, or choose another repository."
    )
