"""Reads ahead of a layer in a replay without a device, begun as the engine begins them.

A pass that compiled code runs by itself reads what the next layer's router makes of this layer's
features, while a trial finds that it saves time. A pass that goes layer by layer reads all that the
next layer lacks, where this one runs nearly all. What a layer does not claim is given up.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lowtide.core import NO_EXPERTS, BoolArray, Demand, Facts, FloatArray, IntArray, StepKind
from lowtide.policies.prefetch import PrefetchOutcome
from lowtide.policies.reads_ahead import NEARLY_ALL, AheadReads, AheadTrial, read_ahead


class AheadSlots(NamedTuple):
    """What reads ahead of a layer have, and go by."""

    num_slots: int = 0  # beside the residents
    max_compiled_rows: int = 0  # of a pass that compiled code runs by itself
    gate_accuracy: float | FloatArray | None = None
    """The accuracy of the next layer's router on a layer's features, as in `foresight`; None:
    compiled passes do not read ahead."""
    piece_share: float = 1.0  # of an expert's read: the part after which it can be given up


NONE_AHEAD = AheadSlots()


class ReplayedAhead:
    """The slots that hold reads for the layer that comes next."""

    def __init__(self, slots: AheadSlots, is_resident: BoolArray, read_s: float) -> None:
        """is_resident [layers, experts]: as it is now, whenever it is looked at."""
        self._slots, self._is_resident, self._read_s = slots, is_resident, read_s
        self._trial = AheadTrial()
        self._expected = NO_EXPERTS

    def is_compiled(self, num_rows: int) -> bool:
        """Whether a pass of so many rows is run by compiled code, if nothing is substituted."""
        return num_rows <= self._slots.max_compiled_rows

    def expect_by_gate(self, facts: Facts, num_evicted: int, predicted: IntArray | None) -> None:
        """Told of a compiled layer. predicted [layers, experts]: tokens, by early gates."""
        following, demand = facts.layer + 1, facts.demand
        self._expected = NO_EXPERTS
        if facts.step.kind is not StepKind.DECODE or following == len(self._is_resident):
            return
        if predicted is not None and self._trial.is_on:
            # Once, as the layer's own reads have taken their slots.
            num_absent = int(np.count_nonzero(~demand.is_resident))
            num_free = max(0, self._slots.num_slots + num_evicted - num_absent)
            is_absent = ~self._is_resident[following]
            self._expected = np.flatnonzero((predicted[following] > 0) & is_absent)[:num_free]

    def expect_by_demand(self, facts: Facts, run: Facts | None) -> None:
        """Told of another layer, as the engine's `ReadAhead` is."""
        demand, step = (facts if run is None else run).demand, facts.step
        num_layers, num_experts = self._is_resident.shape
        is_repeated = step.kind is StepKind.DENOISE and not step.is_last and num_layers > 1
        is_replaced = run is not None and bool(demand.is_resident.all())
        following = (facts.layer + 1) % num_layers
        self._expected = NO_EXPERTS
        if len(demand.experts) < NEARLY_ALL * num_experts or is_replaced:
            return
        if following or is_repeated:
            absent = np.flatnonzero(~self._is_resident[following])
            self._expected = absent[: self._slots.num_slots]

    def claim(self, demand: Demand, window_s: float) -> tuple[AheadReads, PrefetchOutcome]:
        """What became of the reads ahead of a layer. window_s: in which the disk was idle."""
        absent = demand.experts[~demand.is_resident]
        num_right = int(np.isin(self._expected, absent).sum())
        num_wrong = len(self._expected) - num_right
        piece_s = self._slots.piece_share * self._read_s
        found = read_ahead(num_right, num_wrong, window_s, self._read_s, piece_s)
        num_useful = int(found.num_useful)
        return found, PrefetchOutcome(num_useful, num_right - num_useful, num_wrong)

    def note_seconds(self, seconds: float) -> None:
        """Counts a compiled pass that missed some expert."""
        self._trial.note_seconds(seconds)
