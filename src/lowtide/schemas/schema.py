"""Data of a tensor schema: names, shapes, and the place of each expert in them.

No tensor or file is touched here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lowtide.schemas.names import USUAL, Names

PART_NAMES = ("gate", "up", "down")
"""An expert's weights in the order of slots and tables."""
DOWN = PART_NAMES.index("down")


class TensorSpec(NamedTuple):
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None  # safetensors name; None: any type that weights can be loaded from
    other_name: str | None = None  # name used by some tools
    keeps_type: bool = False  # never converted: a router, or a matrix not used in products as it is
    is_centred: bool = False  # of a norm that multiplies by 1 + w

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class SlotTarget(NamedTuple):
    """Destination in a slot of a stored part that does not map to one slot part in order.

    The stored part holds `num_parts` slot parts of one shape, from `first` on, interleaved row by
    row, or element by element if it `is_transposed`. With a `format` (its name), the part and the
    stored parts `others` are that format's tensors, in order.
    """

    first: int
    num_parts: int = 1
    is_transposed: bool = False
    format: str | None = None
    others: tuple[int, ...] = ()


class PartSource(NamedTuple):
    """Source of one stored part (usually gate, up or down) of every expert of a layer.

    Either a tensor per expert, or, with `num_stacked` experts, one tensor [experts, rows, ...]
    whose rows may hold several parts of an expert, one after the other.
    """

    template: str  # with {layer}, and with {expert} if every expert has a tensor of its own
    part_shape: tuple[int, ...]  # of this part of one expert: rows, mostly columns too
    num_stacked: int = 0
    num_fused: int = 1  # parts of equal size that share an expert's rows
    position: int = 0  # of this part among them
    dtype: str | None = None  # as in TensorSpec

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor: [experts, rows, ..] if experts are stacked."""
        rows, *others = self.part_shape
        if self.num_stacked == 0:
            return self.part_shape
        return self.num_stacked, self.num_fused * rows, *others

    @property
    def part_elements(self) -> int:
        return math.prod(self.part_shape)

    @property
    def num_parts(self) -> int:
        """Number of parts of this size in the tensor, of all experts."""
        return max(1, self.num_stacked * self.num_fused)

    def place(self, expert: int) -> int:
        """Return the number of parts of this size in the tensor before this part of `expert`."""
        return 0 if self.num_stacked == 0 else expert * self.num_fused + self.position

    def spec(self, layer: int, expert: int) -> TensorSpec:
        """Return the tensor that holds this part of an expert."""
        return TensorSpec(self.template.format(layer=layer, expert=expert), self.shape, self.dtype)


class ExpertStorage(NamedTuple):
    """One way to store expert weights.

    Without `targets` the parts are those of a slot: gate, up, down. With them, part i goes to
    `targets[i]`, which is None for one of the `others` of another part.
    """

    name: str
    parts: tuple[PartSource, ...]
    targets: tuple[SlotTarget | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelSchema:
    """Every tensor that a model needs.

    `storages` are the accepted ways to store the experts, the published one first. `absent` lists
    names that contradict the config: a checkpoint with one would silently be computed wrongly.
    """

    dense: tuple[TensorSpec, ...]
    storages: tuple[ExpertStorage, ...]
    moe_layers: tuple[int, ...]  # by their number in the model
    num_experts: int
    one_expert_elements: int  # weights (and biases) of one expert, however they are stored
    absent: tuple[str, ...] = ()
    names: Names = USUAL

    def expert_specs(self, layer: int) -> Iterator[TensorSpec]:
        """Yield the published expert tensors of a layer, expert by expert: gate, up, down."""
        parts = self.storages[0].parts
        num_separate = 1 if all(source.num_stacked for source in parts) else self.num_experts
        for expert in range(num_separate):
            for source in parts:
                yield source.spec(layer, expert)

    @property
    def dense_elements(self) -> int:
        return sum(spec.num_elements for spec in self.dense)

    @property
    def expert_elements(self) -> int:
        """Number of elements of all routed experts together."""
        return self.one_expert_elements * self.num_experts * len(self.moe_layers)


def ungated_storages(
    num_experts: int, expert_size: int, hidden_size: int
) -> tuple[ExpertStorage, ...]:
    """Return the storages of experts of up and down alone, the published one first."""
    mlp, targets = "model.layers.{layer}.mlp.experts.", (SlotTarget(1), SlotTarget(DOWN))
    shapes = {"up": (expert_size, hidden_size), "down": (hidden_size, expert_size)}
    apart = (PartSource(f"{mlp}{{expert}}.{x}_proj.weight", shape) for x, shape in shapes.items())
    stacked = (
        PartSource(f"{mlp}{part}_proj", shape, num_experts) for part, shape in shapes.items()
    )
    return (
        ExpertStorage("per expert", tuple(apart), targets),
        ExpertStorage("stacked", tuple(stacked), targets),
    )


def expert_storages(
    num_experts: int, expert_size: int, hidden_size: int
) -> tuple[ExpertStorage, ...]:
    """Return the storages of gated experts in Hugging Face folders, most common first.

    All store gate and up as [expert_size, hidden_size] and down as [hidden_size, expert_size]; they
    differ in names and in what is stacked.
    """
    inward, outward = (expert_size, hidden_size), (hidden_size, expert_size)
    mlp = "model.layers.{layer}.mlp."

    def separate(name: str, gate: str, up: str, down: str) -> ExpertStorage:
        parts = (PartSource(gate, inward), PartSource(up, inward), PartSource(down, outward))
        return ExpertStorage(name, parts)

    def fused(name: str, gate_up: str, down: str) -> ExpertStorage:
        gate = PartSource(gate_up, inward, num_experts, num_fused=2, position=0)
        up = gate._replace(position=1)
        return ExpertStorage(name, (gate, up, PartSource(down, outward, num_experts)))

    published = mlp + "experts.{expert}."
    mixtral = "model.layers.{layer}.block_sparse_moe.experts.{expert}."
    stacked = (
        PartSource(mlp + "experts.gate_proj", inward, num_experts),
        PartSource(mlp + "experts.up_proj", inward, num_experts),
        PartSource(mlp + "experts.down_proj", outward, num_experts),
    )
    return (
        separate("per expert", *(f"{published}{part}_proj.weight" for part in PART_NAMES)),
        separate("per expert (Mixtral)", *(f"{mixtral}{w}.weight" for w in ("w1", "w3", "w2"))),
        ExpertStorage("stacked (VeOmni)", stacked),
        fused("stacked, gate and up fused (dInfer)", mlp + "w1", mlp + "w2"),
        fused(
            "stacked, gate and up fused (transformers)",
            mlp + "experts.gate_up_proj",
            mlp + "experts.down_proj",
        ),
    )
