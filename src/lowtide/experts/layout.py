"""Layout of experts in slots: their parts, each in its own format.

Layers may differ, because published files mix formats; all slots are as large as the largest
expert.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.core import MoEShape, align_up
from lowtide.formats import MatrixFormat
from lowtide.formats.mixed import Mixed
from lowtide.formats.plain import plain_format
from lowtide.kernels.operands import (
    AnyWeights,
    ClampedWeights,
    ExpertWeights,
    GeluWeights,
    Matrix,
    SquaredWeights,
)

Formats = tuple[MatrixFormat | None, ...]
"""Format of each part of an expert; None: the compute dtype."""


class PartLayout(NamedTuple):
    """Layout of one matrix or bias of an expert in its slot."""

    shape: tuple[int, ...]
    format: MatrixFormat
    offsets: tuple[int, ...]  # of each of the format's tensors, on 64-byte boundaries
    num_bytes: tuple[int, ...]  # of each of them, without padding


class ExpertLayout(NamedTuple):
    """Layout of one layer's experts: gate, up and down, and the biases of clamped experts.

    The gate of experts that have none is a part of no rows.
    """

    weights: type[AnyWeights]
    parts: tuple[PartLayout, ...]
    dtype: torch.dtype  # that they compute in
    num_bytes: int
    tags: int | None = None  # offset of the parts' format tags, a byte each, if experts differ

    @classmethod
    def of(
        cls,
        hidden_size: int,
        expert_size: int,
        dtype: torch.dtype,
        weights: type[AnyWeights] = ExpertWeights,
        kept: Formats = (),
    ) -> ExpertLayout:
        """Lay out the parts; kept: their formats, by default the compute dtype."""
        inward, outward = (expert_size, hidden_size), (hidden_size, expert_size)
        gate = (0, hidden_size) if weights is SquaredWeights else inward
        shapes: list[tuple[int, ...]] = [gate, inward, outward]
        if weights is ClampedWeights:
            shapes += [(expert_size,), (expert_size,), (hidden_size,)]
        parts: list[PartLayout] = []
        end = 0
        for number, shape in enumerate(shapes):
            chosen = kept[number] if number < len(kept) else None
            parts.append(_part(shape, chosen or plain_format(dtype), end))
            end = align_up(parts[-1].offsets[-1] + parts[-1].num_bytes[-1])
        if any(isinstance(part.format, Mixed) for part in parts):
            return cls(weights, tuple(parts), dtype, align_up(end + len(parts)), tags=end)
        return cls(weights, tuple(parts), dtype, end)

    @property
    def is_plain(self) -> bool:
        """True if all parts are in the compute dtype."""
        return all(part.format is plain_format(self.dtype) for part in self.parts)

    @property
    def formats(self) -> tuple[MatrixFormat, ...]:
        return tuple(part.format for part in self.parts)

    @property
    def largest_formats(self) -> tuple[MatrixFormat, ...]:
        """For each part, the largest format that any expert has it in."""
        found = []
        for part in self.parts:
            sizes = {each.matrix_bytes(part.shape): each for each in part.format.variants}
            found.append(sizes[max(sizes)])
        return tuple(found)

    def mark_largest(self, slot: Tensor) -> None:
        """Tag the bytes in `slot` as an expert in `largest_formats`, whatever they contain."""
        for number, own in enumerate(self.largest_formats):
            if self.tags is not None:
                slot[self.tags + number] = self.parts[number].format.variants.index(own)

    def weights_in(self, slot: Tensor) -> AnyWeights:
        """Return the parts of the expert in `slot` [num_bytes or more] uint8, as views."""
        gate, up, down = (self._matrix(number, slot) for number in range(3))
        if self.weights is SquaredWeights:
            return SquaredWeights(up, down)
        if self.weights is not ClampedWeights:
            return (GeluWeights if self.weights is GeluWeights else ExpertWeights)(gate, up, down)
        biases = (self._elements(part, slot) for part in self.parts[3:])
        return ClampedWeights(gate, up, down, *biases)

    def variant(self, part: int, stored: MatrixFormat) -> int | None:
        """Return the tag of a part's format; None if the part has the same in all experts."""
        kinds = self.parts[part].format.variants
        return kinds.index(stored) if len(kinds) > 1 else None

    def _matrix(self, number: int, slot: Tensor) -> Matrix:
        part = self.parts[number]
        if self.tags is not None and isinstance(part.format, Mixed):
            own = part.format.variants[int(slot[self.tags + number])]
            return own.matrix([slot[part.offsets[0] :][: own.matrix_bytes(part.shape)]], part.shape)
        if part.format is plain_format(self.dtype):
            return self._elements(part, slot)
        places = zip(part.offsets, part.num_bytes, strict=True)
        tensors = [slot[offset : offset + num_bytes] for offset, num_bytes in places]
        return part.format.matrix(tensors, part.shape)

    def _elements(self, part: PartLayout, slot: Tensor) -> Tensor:
        start = part.offsets[0]
        return slot[start : start + part.num_bytes[0]].view(self.dtype).view(part.shape)


class SlotLayout:
    """Layouts of all MoE layers; every slot can hold an expert of any."""

    def __init__(self, layers: Sequence[ExpertLayout]) -> None:
        """Combine the layouts of at least one layer, of one compute dtype."""
        self.layers = tuple(layers)
        self.dtype = layers[0].dtype
        self.largest = max(layers, key=lambda layout: layout.num_bytes)
        self.num_bytes = self.largest.num_bytes  # of a slot

    @classmethod
    def of(
        cls,
        shape: MoEShape,
        dtype: torch.dtype,
        weights: type[AnyWeights] = ExpertWeights,
        kept: Sequence[Formats] = (),
    ) -> SlotLayout:
        """Lay out all layers; kept: by layer, see `ExpertLayout.of`."""
        made: dict[Formats, ExpertLayout] = {}
        layers = []
        for formats_of_layer in kept or [()] * shape.num_layers:
            if formats_of_layer not in made:
                made[formats_of_layer] = ExpertLayout.of(
                    shape.hidden_size, shape.expert_size, dtype, weights, formats_of_layer
                )
            layers.append(made[formats_of_layer])
        return cls(layers)

    @cached_property
    def is_plain(self) -> bool:
        """Return True if all parts of all layers are in the compute dtype."""
        return all(layout.is_plain for layout in self.layers)

    @property
    def num_unused_bytes(self) -> int:
        """The unused bytes of an average slot; layers of different sizes leave some."""
        return self.num_bytes - sum(layer.num_bytes for layer in self.layers) // len(self.layers)

    def describe(self) -> str:
        """Return the formats in use, for people and stored costs."""
        found = [each for layout in self.layers for each in layout.formats]
        names = {own.name: None for each in found for own in each.variants}
        dtype = str(self.dtype).removeprefix("torch.")
        return dtype if self.is_plain else f"{dtype} from {', '.join(names)}"


def _part(shape: tuple[int, ...], chosen: MatrixFormat, start: int) -> PartLayout:
    chosen = chosen.for_rows(shape[-1])
    sizes = [chosen.num_bytes(math.prod(shape), i) for i in range(len(chosen.block_bytes))]
    if len(sizes) == 1:
        sizes = [chosen.matrix_bytes(shape)]
    offsets = [start]
    for size in sizes[:-1]:
        offsets.append(align_up(offsets[-1] + size))
    return PartLayout(shape, chosen, tuple(offsets), tuple(sizes))
