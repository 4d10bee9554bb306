"""The nouns of a tensor schema: what a family's checkpoints hold, as data.

No tensor is touched here and no file: names, shapes and where an expert lies in them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

PART_NAMES = ("gate", "up", "down")
"""An expert's weights in the order that slots and tables have them."""


class TensorSpec(NamedTuple):
    """One tensor as a checkpoint has it."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None  # safetensors name; None: any type that weights can be loaded from
    other_name: str | None = None  # under which some tools write it

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class PartSource(NamedTuple):
    """Where one part (gate, up or down) of every expert of a layer is found.

    In a tensor per expert; or, with `num_stacked` experts, in one tensor [experts, rows, columns]
    whose rows may hold several parts of an expert, one after the other.
    """

    template: str  # with {layer}, and with {expert} if every expert has a tensor of its own
    part_shape: tuple[int, int]  # of this part of one expert: rows, columns
    num_stacked: int = 0
    num_fused: int = 1  # parts of equal size that share an expert's rows
    position: int = 0  # of this part among them

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        rows, columns = self.part_shape
        if self.num_stacked == 0:
            return rows, columns
        return self.num_stacked, self.num_fused * rows, columns

    @property
    def part_elements(self) -> int:
        return self.part_shape[0] * self.part_shape[1]

    def first_element(self, expert: int) -> int:
        """Elements of the tensor before this part of `expert`; the part is contiguous."""
        if self.num_stacked == 0:
            return 0
        return (expert * self.num_fused + self.position) * self.part_elements

    def spec(self, layer: int, expert: int) -> TensorSpec:
        """The tensor that holds this part of an expert."""
        return TensorSpec(self.template.format(layer=layer, expert=expert), self.shape)


class ExpertLayout(NamedTuple):
    """One way that expert weights are stored."""

    name: str
    parts: tuple[PartSource, PartSource, PartSource]  # gate, up, down


@dataclass(frozen=True, slots=True)
class ModelSchema:
    """Every tensor a model needs.

    `layouts` are the accepted ways to store the experts; the first is how they are published.
    `absent` are names that contradict the config if they exist: a checkpoint with them would be
    computed wrongly, and silently.
    """

    dense: tuple[TensorSpec, ...]
    layouts: tuple[ExpertLayout, ...]
    moe_layers: range  # by their number in the model
    num_experts: int
    absent: tuple[str, ...] = ()

    def expert_specs(self, layer: int) -> Iterator[TensorSpec]:
        """The published expert tensors of a layer, by expert, each as gate, up, down."""
        for expert in range(self.num_experts):
            for source in self.layouts[0].parts:
                yield source.spec(layer, expert)

    @property
    def num_tensors(self) -> int:
        """In the published layout."""
        return len(self.dense) + 3 * len(self.moe_layers) * self.num_experts

    @property
    def num_parameters(self) -> int:
        return self.dense_elements + self.expert_elements

    @property
    def dense_elements(self) -> int:
        return sum(spec.num_elements for spec in self.dense)

    @property
    def expert_elements(self) -> int:
        """Of all routed experts together."""
        one = sum(source.part_elements for source in self.layouts[0].parts)
        return one * self.num_experts * len(self.moe_layers)


def expert_layouts(
    num_experts: int, expert_size: int, hidden_size: int
) -> tuple[ExpertLayout, ...]:
    """The layouts in which Hugging Face folders hold gated experts, most usual first.

    All store gate and up as [expert_size, hidden_size] and down as [hidden_size, expert_size];
    they differ in names and in what is stacked.
    """
    inward, outward = (expert_size, hidden_size), (hidden_size, expert_size)
    mlp = "model.layers.{layer}.mlp."

    def separate(name: str, gate: str, up: str, down: str) -> ExpertLayout:
        parts = (PartSource(gate, inward), PartSource(up, inward), PartSource(down, outward))
        return ExpertLayout(name, parts)

    def fused(name: str, gate_up: str, down: str) -> ExpertLayout:
        gate = PartSource(gate_up, inward, num_experts, num_fused=2, position=0)
        up = gate._replace(position=1)
        return ExpertLayout(name, (gate, up, PartSource(down, outward, num_experts)))

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
        ExpertLayout("stacked (VeOmni)", stacked),
        fused("stacked, gate and up fused (dInfer)", mlp + "w1", mlp + "w2"),
        fused(
            "stacked, gate and up fused (transformers)",
            mlp + "experts.gate_up_proj",
            mlp + "experts.down_proj",
        ),
    )
