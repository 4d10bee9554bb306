"""The refresh interval tau: how far routing drifts, and how often a refresh pays for itself.

Works on hits [steps, layers, experts], tokens routed to each expert, one array per block (or one
for a whole autoregressive answer). Residents are chosen as `Tide` chooses them. Symbols are those
of TIDE: B residents per layer, T steps, d the drift, f(tau) the misses.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.core import BoolArray, Demand, FloatArray, IntArray, Step, StepKind
from lowtide.errors import UsageError


def drift(blocks: Sequence[IntArray], budget: int) -> float:
    """TIDE's d: the share of the best resident set that changes from one step to the next.

    The mean over steps, layers and blocks of |best(t) - best(t - 1)| / `budget`; 0 when no block
    has two steps.
    """
    _check_budget(budget)
    num_changes = num_steps = 0
    for hits in blocks:
        best = np.zeros(hits.shape[1:], np.bool_)
        for step, now in enumerate(hits):
            last, best = best, best_residents(now, best, budget)
            if step:
                num_changes += int((best & ~last).sum())
                num_steps += len(best)
    return num_changes / (budget * num_steps) if num_steps else 0.0


def miss_shares(blocks: Sequence[IntArray], budget: int, max_tau: int) -> FloatArray:
    """TIDE's f(tau) for tau = 1..`max_tau`: activated experts that are absent, over `budget`.

    The mean over the steps of all intervals, refresh steps included, and over layers; the
    interval starts anew with each block. [max_tau]
    """
    _check_budget(budget)
    num_steps = sum(hits.shape[0] * hits.shape[1] for hits in blocks)
    taus = range(1, max_tau + 1)
    misses = [sum(_num_misses(hits, budget, tau) for hits in blocks) for tau in taus]
    shares: FloatArray = np.array(misses, np.float64) / max(1, budget * num_steps)
    return shares


def best_residents(hits: IntArray, is_resident: BoolArray, budget: int) -> BoolArray:
    """The `budget` experts of each layer with most hits; residents, then lower ids, win ties.

    hits, is_resident and the result [layers, experts].
    """
    rank = 2 * hits.astype(np.int64) + is_resident
    order = np.argsort(-rank, axis=1, kind="stable")[:, :budget]
    best = np.zeros(rank.shape, np.bool_)
    np.put_along_axis(best, order, True, axis=1)
    return best & (rank > 0)


def expected_migrations(d: float, num_steps: int, budget: int, tau: int) -> float:
    """Experts moved per layer in `num_steps` steps: (B T / tau) (1 - (1 - d)^tau), TIDE's Eq. 6.

    The exponent is tau: with the printed tau - 1 nothing would move at tau = 1.
    """
    return float(budget * num_steps / tau * (1.0 - (1.0 - d) ** tau))


def paper_cost_s(
    tau: int,
    d: float,
    misses: FloatArray,
    num_steps: int,
    budget: int,
    link_s: float,
    host_s: float,
) -> float:
    """TIDE's Eq. 7 with C_io restored, seconds of transfers and of host computation per layer.

    `misses`: f(1), f(2), ...; `link_s` (C_io) per expert moved, `host_s` (C_cpu) per missed one.
    """
    moves_s = link_s * expected_migrations(d, num_steps, budget, tau)
    return moves_s + host_s * num_steps * budget * float(misses[tau - 1])


def paper_tau(
    d: float, misses: FloatArray, num_steps: int, budget: int, link_s: float, host_s: float
) -> int:
    """The tau in 1..T-1 (as far as `misses` reaches) of least `paper_cost_s`; the lesser of equals.

    A block of one step has tau 1.
    """
    _check_budget(budget)
    if not len(misses):
        raise UsageError("tau needs the misses of at least tau = 1; there are none.")
    taus = range(1, max(1, min(num_steps - 1, len(misses))) + 1)
    return min(
        taus, key=lambda tau: paper_cost_s(tau, d, misses, num_steps, budget, link_s, host_s)
    )


def calibrated_tau(blocks: Sequence[IntArray], budget: int, link_s: float, host_s: float) -> int:
    """`paper_tau` with the drift and the misses of recorded blocks, of their mean length."""
    if not blocks:
        raise UsageError("tau=paper needs a calibration with at least one block of steps.")
    num_steps = max(1, round(float(np.mean([len(hits) for hits in blocks]))))
    misses = miss_shares(blocks, budget, max(1, num_steps - 1))
    return paper_tau(drift(blocks, budget), misses, num_steps, budget, link_s, host_s)


def auto_tau(simulated_s: Callable[[int], float], taus: Iterable[int]) -> int:
    """The tau of least simulated time; the first of equals."""
    candidates = list(taus)
    if not candidates:
        raise UsageError("tau cannot be chosen from an empty range.")
    return min(candidates, key=simulated_s)


class FollowDrift(NamedTuple):
    """The interval that follows the drift while a model runs."""

    start: int = 4


class SolvedTau(enum.Enum):
    """An interval that is solved for before policies are made."""

    PAPER = "paper"  # TIDE's Eq. 7, from a calibration


MAX_ONLINE_TAU = 16
"""Longest interval that `OnlineTau` watches unless it is told otherwise."""


class TauChange(NamedTuple):
    """What `OnlineTau` tells of a change."""

    num_steps: int  # seen until then
    old: int
    new: int
    drift: float


class OnlineTau:
    """Follows the drift while a model runs, and changes tau where Eq. 7 says it pays.

    Watches a few layers. Misses are kept by the age of the resident set they were met with, in
    exponential means, so f(tau) is the mean over ages 0 to tau - 1; ages do not reach across a
    block's start. After every `window` steps the best tau is computed; it is taken only when it
    lowers the expected cost by more than `hysteresis`; `on_change` is told.
    """

    def __init__(
        self,
        num_experts: int,
        budget: int,
        link_s: float,
        host_s: float,
        *,
        tau: int = 4,
        max_tau: int = MAX_ONLINE_TAU,
        window: int = 32,
        hysteresis: float = 0.1,
        decay: float = 0.95,
        watched: Iterable[int] = (0,),
        on_change: Callable[[TauChange], None] = lambda change: None,
    ) -> None:
        """`link_s`, `host_s`: seconds per expert moved, per missed expert computed on the host.

        `decay`: weight of the past per observation. `watched`: layers, numbered from 0.
        """
        _check_budget(budget)
        if not 1 <= tau <= max_tau or window < 1:
            raise UsageError(
                f"tau {tau} must be in 1..{max_tau} and the window {window} at least 1."
            )
        self.tau = tau
        self._budget = budget
        self._link_s = link_s
        self._host_s = host_s
        self._max_tau = max_tau
        self._window = window
        self._hysteresis = hysteresis
        self._on_change = on_change
        self._watched = {layer: _Ages(num_experts, budget, max_tau, decay) for layer in watched}
        self._last_layer = max(self._watched, default=0)
        self._num_steps = 0

    def observe(self, step: Step, layer: int, demand: Demand) -> None:
        """Tells one layer's demand; prefill passes and layers that are not watched are ignored."""
        ages = self._watched.get(layer)
        if ages is None or step.kind is StepKind.PREFILL:
            return
        ages.observe(step, demand)
        is_first, self._last_layer = layer <= self._last_layer, layer
        if is_first:
            self._num_steps += 1
            if self._num_steps % self._window == 0:
                self._choose()

    @property
    def drift(self) -> float:
        """d over the watched layers, as it is seen now."""
        return float(np.mean([ages.drift for ages in self._heard]))

    def misses(self) -> FloatArray:
        """f(1)..f(max_tau) as they are seen now."""
        by_age = np.mean([ages.missed for ages in self._heard], axis=0)
        shares: FloatArray = np.cumsum(by_age) / np.arange(1, self._max_tau + 1) / self._budget
        return shares

    @property
    def _heard(self) -> list[_Ages]:
        """Of the watched layers; one whose experts are all resident is never told of."""
        watched = list(self._watched.values())
        return [ages for ages in watched if ages.is_heard] or watched

    def _choose(self) -> None:
        d, misses = self.drift, self.misses()

        def cost_s(tau: int) -> float:
            return paper_cost_s(tau, d, misses, 1, self._budget, self._link_s, self._host_s)

        best = min(range(1, self._max_tau + 1), key=cost_s)
        if cost_s(best) < (1 - self._hysteresis) * cost_s(self.tau):
            self._on_change(TauChange(self._num_steps, self.tau, best, d))
            self.tau = best


def interval(tau: int | OnlineTau) -> int:
    """The refresh interval in force, in steps."""
    return tau.tau if isinstance(tau, OnlineTau) else tau


class _Ages:
    """One layer: how many activated experts each of its last best sets would have missed."""

    def __init__(self, num_experts: int, budget: int, max_tau: int, decay: float) -> None:
        self._budget = min(budget, num_experts)
        self._decay = decay
        # Newest first; float32, because a product with them is what counting costs least by.
        self._bests = np.zeros((max_tau, num_experts), np.float32)
        self._num_ages = 0
        self._rank = np.zeros(num_experts, np.int64)
        self._is_active = np.zeros(num_experts, np.float32)
        self._order = np.arange(num_experts)[::-1].copy()
        self._sums = np.zeros((2, max_tau))  # of misses by age, and of what they are divided by
        self._drift_sum = 0.0

    def observe(self, step: Step, demand: Demand) -> None:
        if step.index == 0:
            self._num_ages = 0
        had_last = self._num_ages > 0
        last = self._bests[0] if had_last else np.zeros_like(self._bests[0])
        best = self._best(demand, last)
        if had_last:
            self._drift_sum *= self._decay
            self._drift_sum += float(best.sum() - best @ last) / self._budget
        self._bests[1:] = self._bests[:-1]
        self._bests[0] = best
        self._num_ages = min(self._num_ages + 1, len(self._bests))
        self._is_active[:] = 0.0
        self._is_active[demand.experts] = 1.0
        found = self._bests[: self._num_ages] @ self._is_active
        sums = self._sums[:, : self._num_ages]
        sums *= self._decay
        sums[0] += len(demand.experts) - found
        sums[1] += 1.0

    def _best(self, demand: Demand, last: NDArray[np.float32]) -> NDArray[np.float32]:
        """As `best_residents`; 1.0 for those, else 0.0."""
        num_experts = len(last)
        rank = self._rank  # made distinct: lower ids win among equals
        rank[:] = last
        rank[demand.experts] += 2 * demand.num_tokens
        rank *= num_experts
        rank += self._order
        least = int(np.partition(rank, -self._budget)[-self._budget])
        return (rank >= max(least, num_experts)).astype(np.float32)

    @property
    def is_heard(self) -> bool:
        return bool(self._sums[1, 0])

    @property
    def drift(self) -> float:
        num_pairs = float(self._sums[1, 1:2].sum())  # observations that had a predecessor
        return self._drift_sum / num_pairs if num_pairs else 0.0

    @property
    def missed(self) -> FloatArray:
        """Mean misses by age [max_tau]; an age not met yet takes that of the one before."""
        sums, weights = self._sums
        known = int(np.count_nonzero(weights))
        missed = np.zeros(len(weights))
        missed[:known] = sums[:known] / weights[:known]
        if known:
            missed[known:] = missed[known - 1]
        return missed


def _num_misses(hits: IntArray, budget: int, tau: int) -> int:
    """Activated experts that are absent in one block, refreshed every `tau` steps."""
    is_resident = np.zeros(hits.shape[1:], np.bool_)
    num_misses = 0
    for step, now in enumerate(hits):
        if step % tau == 0:
            is_resident = best_residents(now, is_resident, budget)
        num_misses += int(((now > 0) & ~is_resident).sum())
    return num_misses


def _check_budget(budget: int) -> None:
    if budget < 1:
        raise UsageError(f"tau needs a budget of at least 1 resident per layer, not {budget}.")
