"""A model's experts, as what loads them is told."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.core import MoEShape
from lowtide.engine.opening.config import MAX_PASS_ROWS
from lowtide.engine.opening.model import OpenModel
from lowtide.experts.layout import SlotLayout
from lowtide.formats.expert_inputs import ExpertInputs
from lowtide.hardware.measure import layer_dense_bytes
from lowtide.schemas import ExpertTable


@dataclass(frozen=True, slots=True)
class ExpertSource:
    """A model's experts: their shape, where they lie in its files, and how a slot holds them."""

    shape: MoEShape
    table: ExpertTable
    layout: SlotLayout
    layer_bytes: int  # dense weights of one MoE layer
    max_rows: int
    inputs: ExpertInputs | None = None  # that weights are rounded for

    @property
    def num_experts(self) -> int:
        return self.shape.num_layers * self.shape.num_experts

    @property
    def scratch_bytes(self) -> int:
        """What the host's experts need beside weights."""
        num_pairs = self.max_rows * self.shape.num_experts_per_token
        return 2 * num_pairs * self.shape.expert_size * self.layout.dtype.itemsize


def expert_source(opened: OpenModel) -> ExpertSource:
    config = opened.config
    return ExpertSource(
        shape=config.moe_shape,
        table=opened.weight_map.experts,
        layout=opened.slot_layout,
        layer_bytes=layer_dense_bytes(
            opened.weight_map.dense, config.moe_layers[-1], opened.dtype.itemsize
        ),
        max_rows=MAX_PASS_ROWS,  # of a longer pass they run a tile at a time
        inputs=opened.inputs,
    )
