"""Prefetch: chooses absent experts of the next layer to fetch before its router has run.

Pure decisions. A mechanism may run the next layer's gate early and pass on its prediction; a policy
ranks. Chosen experts are fetched into separate slots, in idle link time only.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lowtide.core import NO_EXPERTS, BoolArray, Facts, FloatArray, IntArray
from lowtide.errors import UsageError


class Gate(enum.Enum):
    """Features given to the next layer's gate, to predict its routing."""

    NONE = "none"  # nothing: no prediction is wanted
    RAW = "raw"  # this layer's gate input as it is
    RESIDUAL = "residual"  # this layer's gate input plus its calibrated residual vector


class Ahead(NamedTuple):
    """Facts about a layer before its router has run."""

    layer: int
    is_kept: BoolArray  # [num_experts]: residents, and those on their way to be
    predicted: IntArray | None = None
    """[num_experts]: tokens that an early gate predicts for each expert; None without a gate."""
    is_long: bool = False
    """True if the pass has too many rows for an early gate."""


class Prefetch(ABC):
    """Ranks the experts of a layer ahead of time, and names the best absent ones."""

    gate: Gate = Gate.NONE

    def __init__(self, num_experts_ahead: int) -> None:
        """num_experts_ahead: most experts prefetched per layer."""
        self.num_experts_ahead = num_experts_ahead

    @abstractmethod
    def score(self, ahead: Ahead) -> FloatArray | IntArray:
        """Return the expected demand of each expert, [num_experts]; 0 is none."""

    def wants_prediction(self, layer: int) -> bool:
        """Return True if `choose` will use a prediction of `layer` by an early gate."""
        return self.gate is not Gate.NONE

    def observe(self, facts: Facts) -> None:  # noqa: B027 (most have no memory)
        """Learn a layer's demand, before `choose` is called for the next layer."""

    def choose(self, ahead: Ahead) -> IntArray:
        """Return absent experts to fetch ahead, the most wanted first; lower ids win ties."""
        if ahead.is_long and self.gate is not Gate.NONE:
            return NO_EXPERTS
        score = self.score(ahead)
        wanted = ((score > 0) > ahead.is_kept).nonzero()[0]
        order = (-score[wanted]).argsort(kind="stable")[: self.num_experts_ahead]
        chosen: IntArray = wanted[order]
        return chosen

    def record(self, outcome: PrefetchOutcome) -> None:  # noqa: B027
        """Learn the outcome of one layer's prefetches."""


@dataclass(slots=True)
class PrefetchOutcome:
    """Counts of prefetched experts, for one layer's step or summed up."""

    num_hits: int = 0  # used on the device, and there in time
    num_late: int = 0  # used on the device, but waited for
    num_wasted: int = 0  # not wanted, or done on the host before it came

    def add(self, other: PrefetchOutcome) -> None:
        self.num_hits += other.num_hits
        self.num_late += other.num_late
        self.num_wasted += other.num_wasted


class NoPrefetch(Prefetch):
    """Fetches nothing ahead."""

    def __init__(self) -> None:
        super().__init__(0)

    def score(self, ahead: Ahead) -> IntArray:
        return np.zeros(1, np.int64)

    def choose(self, ahead: Ahead) -> IntArray:
        return NO_EXPERTS


class NextGate(Prefetch):
    """Ranks by the next layer's gate on this layer's features (HybriMoE): predicted tokens."""

    gate = Gate.RAW

    def score(self, ahead: Ahead) -> IntArray:
        if ahead.predicted is None:
            raise UsageError(
                f"This prefetch needs the early gate's prediction ({self.gate.value})."
            )
        return ahead.predicted


class Residual(NextGate):
    """Ranks by the next layer's gate on features moved by the mean residual (DALI, Eqs. 10-11)."""

    gate = Gate.RESIDUAL


def count_following(ids: Sequence[IntArray], num_experts: int) -> FloatArray:
    """Count how often each expert of a layer is followed by each of the next layer's, per token.

    `ids`: arrays [rows, layers, k] of expert ids. Returns [layers - 1, experts, experts].
    """
    num_layers = ids[0].shape[1] if len(ids) else 1
    following = np.zeros((max(0, num_layers - 1), num_experts, num_experts))
    for rows in ids:
        for layer in range(num_layers - 1):
            now, then = rows[:, layer, :, None], rows[:, layer + 1, None, :]
            np.add.at(following[layer], (now.astype(np.int64), then.astype(np.int64)), 1.0)
    return following


class PreviousStep(Prefetch):
    """Ranks by the layer's demand one step ago, which hardly changes in a diffusion block."""

    def __init__(self, num_experts_ahead: int, num_layers: int, num_experts: int) -> None:
        super().__init__(num_experts_ahead)
        self._hits = np.zeros((num_layers, num_experts), np.int64)

    def observe(self, facts: Facts) -> None:
        hits, demand = self._hits[facts.layer], facts.demand
        hits[:] = 0
        hits[demand.experts] = demand.num_tokens

    def score(self, ahead: Ahead) -> IntArray:
        last: IntArray = self._hits[ahead.layer]
        return last


class Combined(Prefetch):
    """Adds an early gate's ranking and another one, each normalised to sum 1."""

    def __init__(self, num_experts_ahead: int, of_gate: NextGate, other: Prefetch) -> None:
        super().__init__(num_experts_ahead)
        self.gate = of_gate.gate
        self._parts = (of_gate, other)
        self._learning = [
            each for each in self._parts if type(each).observe is not Prefetch.observe
        ]

    def observe(self, facts: Facts) -> None:
        for part in self._learning:
            part.observe(facts)

    def score(self, ahead: Ahead) -> FloatArray:
        total = np.zeros(1)
        for part in self._parts:
            score = part.score(ahead)
            total = total + score * (1.0 / max(float(np.add.reduce(score)), 1e-30))
        return total


_WATCH_STRIDE = 8  # a silent prefetch forecasts one layer in this many, each in its turn
_MARGIN = 1.5
_DECAY = 0.98  # of the sums, from one layer to the next


class PaysOff(Prefetch):
    """Uses a prefetcher while it pays, and otherwise only observes its forecasts.

    A hit saves the transfer that a wasted expert costs; both are counted as exponential sums over
    layers. Prefetching stops when there are fewer hits than wasted experts, and resumes when
    `_MARGIN` times as many of its silent forecasts would hit. A late expert counts neither way,
    since its bytes were used. Forecasts cost time, so few are made in silence.
    """

    def __init__(self, inner: Prefetch) -> None:
        super().__init__(inner.num_experts_ahead)
        self.gate = inner.gate
        self.is_on = True
        self._inner = inner
        self._hits = self._wasted = 0.0
        self._forecasts: dict[int, IntArray] = {}  # layer: what would have been prefetched
        self._num_steps = 0
        self._last_layer = -1

    def wants_prediction(self, layer: int) -> bool:
        return self._is_watched(layer) and self._inner.wants_prediction(layer)

    def score(self, ahead: Ahead) -> FloatArray | IntArray:
        return self._inner.score(ahead)

    def observe(self, facts: Facts) -> None:
        self._inner.observe(facts)
        forecast = self._forecasts.pop(facts.layer, None)
        if forecast is not None:
            wanted = facts.demand.experts.tolist()
            num_hits = len(set(forecast.tolist()).intersection(wanted))
            self._weigh(num_hits, len(forecast) - num_hits)

    def choose(self, ahead: Ahead) -> IntArray:
        layer = ahead.layer
        # It may have been switched on after the early gate was passed over.
        is_foretold = ahead.predicted is not None or self.gate is Gate.NONE
        is_watched = is_foretold and self._is_watched(layer)
        self._num_steps += layer <= self._last_layer
        self._last_layer = layer
        if not is_watched:
            return NO_EXPERTS
        chosen = self._inner.choose(ahead)
        if self.is_on:
            return chosen
        self._forecasts[layer] = chosen
        return chosen[:0]

    def _is_watched(self, layer: int) -> bool:
        """Return True if a forecast of `layer` is made the next time."""
        num_steps = self._num_steps + (layer <= self._last_layer)
        return self.is_on or (num_steps + layer) % _WATCH_STRIDE == 0

    def record(self, outcome: PrefetchOutcome) -> None:
        self._inner.record(outcome)
        self._weigh(outcome.num_hits, outcome.num_wasted)

    def _weigh(self, num_hits: int, num_wasted: int) -> None:
        self._hits = _DECAY * self._hits + num_hits
        self._wasted = _DECAY * self._wasted + num_wasted
        if self.is_on:
            self.is_on = self._hits >= self._wasted
        else:
            self.is_on = self._hits > _MARGIN * self._wasted
