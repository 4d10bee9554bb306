"""Substitute for the expert runtime in a model without experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict

import numpy as np

from lowtide.core import Step
from lowtide.errors import InternalError
from lowtide.experts.rows import LayerCall
from lowtide.experts.runtime import ExpertObserver, Observer
from lowtide.experts.stats import NO_ADVANCES, ExpertLook, ExpertStats, HostStats
from lowtide.policies.receipt import Receipt
from lowtide.threads.event import Event


class NoExperts:
    """Expert runtime without experts: nothing is placed, read or counted."""

    device = None
    asks_scores = False
    joins_chunks = False
    observer: Observer | None = None
    expert_observer: ExpertObserver | None = None

    def forward(self, call: LayerCall) -> None:
        raise InternalError(f"MoE layer {call.layer} of a model without experts.")

    def parts(self, layer: int) -> None:
        """Return None: kernels have no experts to run."""

    def residents(self) -> None:
        """Return None: no compiled call finds experts here."""

    def settle_whole(self) -> int:
        """Return the same number always: no expert ever moves."""
        return 0

    def add_counts(self) -> None:
        """Do nothing."""

    def end_repeated(self, num_rows: int, use: Event) -> None:
        """Do nothing."""

    def end_capture(self, use: Event) -> None:
        """Do nothing."""

    def begin_pass(self, step: Step) -> None:
        """Do nothing."""

    def end_pass(self) -> None:
        """Do nothing."""

    def watched(self) -> AbstractContextManager[Callable[[], ExpertLook]]:
        """Look at no experts."""
        return nullcontext(lambda: ExpertLook({}, np.zeros((0, 0), np.int64)))

    def whole_pass(self) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def take_receipt(self, request: int) -> Receipt | None:
        """Return None: nothing is replaced."""
        return None

    def as_dict(self) -> dict[str, float]:
        """Return the counters of a runtime without a device, all at their start; no hit rate."""
        stats = ExpertStats()
        return {**asdict(stats), **asdict(HostStats()), **NO_ADVANCES, "hit_rate": math.nan}

    def stop_waiting(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
