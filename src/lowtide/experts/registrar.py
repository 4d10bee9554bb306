"""What stands in for the expert runtime while a forward pass is only counted."""

from __future__ import annotations

from torch import Tensor

from lowtide.core import MoEShape, Step
from lowtide.experts.none import NoExperts
from lowtide.experts.rows import LayerBuffers, Routing
from lowtide.experts.told import take_substituted
from lowtide.memory.workspace import Buffers


class ExpertRegistrar(NoExperts):
    """Takes what a layer's experts take of the workspace, and computes nothing."""

    def __init__(
        self, shape: MoEShape, substitutes: bool = False, asks_scores: bool = False
    ) -> None:
        """substitutes, asks_scores: as the policies of the runtime do that it stands for."""
        self._shape = shape
        self._substitutes = substitutes
        self.asks_scores = asks_scores

    def forward(
        self,
        layer: int,
        x: Tensor,
        routing: Routing,
        step: Step,
        workspace: Buffers,
        out: Tensor,
        scores: Tensor | None = None,
    ) -> None:
        if self._substitutes:
            take_substituted(workspace, routing.experts.numel())
        LayerBuffers.take(workspace, self._shape, x).take_terms(workspace, x)
