"""What stands in for the expert runtime while a forward pass is only counted."""

from __future__ import annotations

from torch import Tensor

from lowtide.core import MoEShape, Step
from lowtide.experts.rows import ExpertBuffers, Routing
from lowtide.memory.workspace import Buffers


class ExpertRegistrar:
    """Takes what a layer's experts take of the workspace, and computes nothing."""

    def __init__(self, shape: MoEShape) -> None:
        self._shape = shape

    def forward(
        self, layer: int, x: Tensor, routing: Routing, step: Step, workspace: Buffers, out: Tensor
    ) -> None:
        ExpertBuffers.take(workspace, self._shape, x)
