"""Stand-in for the expert runtime while a forward pass is only counted."""

from __future__ import annotations

from lowtide.core import MoEShape
from lowtide.experts.no_experts import NoExperts
from lowtide.experts.policy_facts import take_substituted
from lowtide.experts.rows import LayerCall, take_buffers, take_terms


class ExpertRegistrar(NoExperts):
    """Runtime that takes the workspace of a layer's experts and computes nothing."""

    def __init__(
        self, shape: MoEShape, substitutes: bool = False, asks_scores: bool = False
    ) -> None:
        """Create it for a runtime whose policies substitute or ask for scores, or neither."""
        self._shape = shape
        self._substitutes = substitutes
        self.asks_scores = asks_scores

    def forward(self, call: LayerCall) -> None:
        if self._substitutes:
            take_substituted(call.workspace, call.routing.experts.numel())
        buffers, terms = take_buffers(call.workspace, self._shape, call.x)
        if terms is None:
            take_terms(call.workspace, buffers, call.x)
