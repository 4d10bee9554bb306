"""What stands where the expert runtime is, in a model that has no experts."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict

from lowtide.core import Step
from lowtide.errors import InternalError
from lowtide.experts.rows import LayerCall
from lowtide.experts.runtime import ExpertObserver, Observer
from lowtide.experts.stats import ExpertStats, HostStats
from lowtide.policies.receipt import Receipt


class NoExperts:
    """Nothing is placed, read or counted; an observer sees no layer."""

    device = None
    asks_scores = False
    observer: Observer | None = None
    expert_observer: ExpertObserver | None = None

    def forward(self, call: LayerCall) -> None:
        raise InternalError(f"MoE layer {call.layer} of a model without experts.")

    def parts(self, layer: int) -> None:
        """None that kernels could run."""

    def residents(self) -> None:
        """None."""

    def begin_pass(self, step: Step) -> None:
        """Nothing is decided."""

    def end_pass(self) -> None:
        """Nothing is learnt."""

    def whole_pass(self) -> AbstractContextManager[None]:
        """Nothing is counted."""
        return nullcontext()

    def take_receipt(self, request: int) -> Receipt | None:
        """Nothing is replaced."""
        return None

    def as_dict(self) -> dict[str, float]:
        """The counters of the runtime without a device, which stay where they are; no hit rate."""
        return {**asdict(ExpertStats()), **asdict(HostStats()), "hit_rate": math.nan}

    def stop_waiting(self) -> None:
        """Reads nothing."""

    def close(self) -> None:
        """Holds nothing."""
