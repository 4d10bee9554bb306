"""The refresh interval tau: how far routing drifts, and how often a refresh pays.

Works on hits [steps, layers, experts], tokens routed to each expert, one array per block (or one
for a whole autoregressive answer). Residents are chosen as `Tide` does. Symbols are TIDE's: B
residents per layer, T steps, d the drift, f(tau) the misses.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lowtide.core import BoolArray, FloatArray, IntArray
from lowtide.errors import UsageError

TAUS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Intervals considered while a model runs or in a simulation, in steps."""


def drift(blocks: Sequence[IntArray], budget: int) -> float:
    """Return TIDE's d: the share of the best resident set that changes from step to step.

    The mean over steps, layers and blocks of |best(t) - best(t - 1)| / `budget`; 0 if no block has
    two steps. Raises UsageError for a budget without residents.
    """
    if budget < 1:
        raise UsageError(f"tau needs a budget of at least 1 resident per layer, not {budget}.")
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
    """Return TIDE's f(tau) for tau = 1..`max_tau`: absent activated experts, over `budget`.

    Shape [max_tau]. The mean over the steps of all intervals, refresh steps included, and over
    layers; the interval restarts with each block.
    """
    num_steps = sum(hits.shape[0] * hits.shape[1] for hits in blocks)
    taus = range(1, max_tau + 1)
    misses = [sum(_num_misses(hits, budget, tau) for hits in blocks) for tau in taus]
    shares: FloatArray = np.array(misses, np.float64) / max(1, budget * num_steps)
    return shares


def best_residents(hits: IntArray, is_resident: BoolArray, budget: int) -> BoolArray:
    """Return each layer's `budget` experts with most hits; residents, then lower ids, win ties.

    hits, is_resident and the result are [layers, experts].
    """
    rank = 2 * hits.astype(np.int64) + is_resident
    order = np.argsort(-rank, axis=1, kind="stable")[:, :budget]
    best = np.zeros(rank.shape, np.bool_)
    np.put_along_axis(best, order, True, axis=1)
    return best & (rank > 0)


def expected_migrations(d: float, num_steps: int, budget: int, tau: int) -> float:
    """Return experts moved per layer in `num_steps`: (B T / tau) (1 - (1 - d)^tau), TIDE's Eq. 5.

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
    """Return TIDE's Eq. 7 with C_io restored: seconds of transfers and host computation per layer.

    misses: f(1), f(2), ... link_s (C_io): per moved expert. host_s (C_cpu): per missed one.
    """
    moves_s = link_s * expected_migrations(d, num_steps, budget, tau)
    return moves_s + host_s * num_steps * budget * float(misses[tau - 1])


def paper_tau(
    d: float, misses: FloatArray, num_steps: int, budget: int, link_s: float, host_s: float
) -> int:
    """Return the tau in 1..T-1 with the least `paper_cost_s`; of equals the lesser.

    T is limited by the length of `misses`. A block of one step has tau 1.
    """
    taus = range(1, max(1, min(num_steps - 1, len(misses))) + 1)
    return min(
        taus, key=lambda tau: paper_cost_s(tau, d, misses, num_steps, budget, link_s, host_s)
    )


def calibrated_tau(blocks: Sequence[IntArray], budget: int, link_s: float, host_s: float) -> int:
    """Return `paper_tau` for the drift and misses of recorded blocks, at their mean length."""
    if not blocks:
        raise UsageError("tau=paper needs a calibration with at least one block of steps.")
    num_steps = max(1, round(float(np.mean([len(hits) for hits in blocks]))))
    misses = miss_shares(blocks, budget, max(1, num_steps - 1))
    return paper_tau(drift(blocks, budget), misses, num_steps, budget, link_s, host_s)


class FollowDrift(NamedTuple):
    """An interval that follows the demand while a model runs (`online_tau.py`)."""

    start: int = 4


class SolvedTau(enum.Enum):
    """An interval that is computed before policies are made."""

    PAPER = "paper"  # TIDE's Eq. 7, from a calibration


def _num_misses(hits: IntArray, budget: int, tau: int) -> int:
    """Count absent activated experts in one block, refreshed every `tau` steps."""
    is_resident = np.zeros(hits.shape[1:], np.bool_)
    num_misses = 0
    for step, now in enumerate(hits):
        if step % tau == 0:
            is_resident = best_residents(now, is_resident, budget)
        num_misses += int(((now > 0) & ~is_resident).sum())
    return num_misses
