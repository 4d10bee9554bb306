"""Reads ahead of a layer in a replay without a device, by the engine's rules.

A pass run by compiled code reads the experts that the next layer's router predicts from this
layer's features, while a trial finds that it saves time. A pass that goes layer by layer reads
everything the next layer lacks, if this one demands nearly all. Unclaimed reads are dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lowtide.core import NO_EXPERTS, BoolArray, Demand, Facts, FloatArray, IntArray, StepKind
from lowtide.policies.prefetch import PrefetchOutcome
from lowtide.policies.reads_ahead import NEARLY_ALL, AheadReads, AheadTrial, read_ahead


class AheadSlots(NamedTuple):
    """Slots and rules for reads ahead of a layer."""

    num_slots: int = 0  # without the residents'
    max_compiled_rows: int = 0  # of a pass that compiled code runs by itself
    gate_accuracy: float | FloatArray | None = None
    """Accuracy of the next layer's router on a layer's features, as in `foresight`; None: compiled
    passes do not read ahead."""
    piece_share: float = 1.0  # of an expert's read: the part after which it can be given up


NONE_AHEAD = AheadSlots()


class ReplayedAhead:
    """Slots with reads for the next layer."""

    def __init__(self, slots: AheadSlots, is_resident: BoolArray, read_s: float) -> None:
        """is_resident [layers, experts]: a view of the present residents."""
        self._slots, self._is_resident, self._read_s = slots, is_resident, read_s
        self._trial = AheadTrial()
        self._expected = NO_EXPERTS

    def is_compiled(self, num_rows: int) -> bool:
        """Return True if compiled code runs a pass of `num_rows` rows without substitutions."""
        return num_rows <= self._slots.max_compiled_rows

    def expect_by_gate(self, facts: Facts, num_evicted: int, predicted: IntArray | None) -> None:
        """Predict after a compiled layer. predicted [layers, experts]: tokens, by early gates."""
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
        """Predict after another layer, as the engine's `ReadAhead` does."""
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
        """Return the outcome of a layer's reads ahead. window_s: during which the disk was idle."""
        absent = demand.experts[~demand.is_resident]
        num_right = int(np.isin(self._expected, absent).sum())
        num_wrong = len(self._expected) - num_right
        piece_s = self._slots.piece_share * self._read_s
        found = read_ahead(num_right, num_wrong, window_s, self._read_s, piece_s)
        num_useful = int(found.num_useful)
        return found, PrefetchOutcome(num_useful, num_right - num_useful, num_wrong)

    def note_seconds(self, seconds: float) -> None:
        """Count a compiled pass that missed some expert."""
        self._trial.note_seconds(seconds)
