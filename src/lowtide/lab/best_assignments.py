"""Assignments that DALI compares its greedy with: the optimum, and a beam of two (A.2).

Both have DALI's cost model (`policies/assignment.py`) and take far longer to decide.
"""

from __future__ import annotations

import numpy as np

from lowtide.core import Assignment, BoolArray, Facts, FloatArray, IntArray
from lowtide.errors import UsageError
from lowtide.policies.assignment import (
    Prices,
    divide,
    greedy_mask,
    lopsided_first,
    makespan,
    prices,
)

MAX_STATES = 1 << 16
"""Partial splits that `Optimum` holds at once, at most."""
_PS = 1e12  # picoseconds in a second


class Beam:
    """Algorithm 1 with `width` partial splits instead of one, scored by their time."""

    def __init__(self, width: int = 2) -> None:
        self._width = width

    def __call__(self, facts: Facts) -> Assignment:
        return divide(facts.demand, beam_mask(prices(facts), self._width))


class Optimum:
    """The split that takes the least time (Opt_plan).

    A layer whose exact search would hold more than `MAX_STATES` partial splits gets the result of a
    beam search with eight.
    """

    def __call__(self, facts: Facts) -> Assignment:
        price = prices(facts)
        try:
            mask = exact_mask(price, MAX_STATES)
        except UsageError:
            mask = beam_mask(price, _WIDE)
        return divide(facts.demand, mask)


_WIDE = 8


def beam_mask(price: Prices, width: int) -> BoolArray:
    """Split experts in the greedy order, keeping the `width` best partial splits instead of one.

    The split is never worse than that of `greedy_mask`.
    """
    order = lopsided_first(price)
    states: list[tuple[float, float, int]] = [(0.0, 0.0, 0)]  # device_s, host_s, bits
    pairs = zip(price.device_s[order].tolist(), price.host_s[order].tolist(), strict=True)
    for place, (device_s, host_s) in enumerate(pairs):
        grown = [(d + device_s, h, bits | 1 << place) for d, h, bits in states]
        grown += [(d, h + host_s, bits) for d, h, bits in states]
        # Of two splits with the same end the one with less work left for both sides is better.
        grown.sort(key=lambda state: (max(state[0], state[1]), state[0] + state[1]))
        states = grown[:width]
    mask = np.empty(len(order), np.bool_)
    mask[order] = [bool(states[0][2] >> place & 1) for place in range(len(order))]
    greedy = greedy_mask(price)
    return mask if makespan(price, mask) <= makespan(price, greedy) else greedy


def exact_mask(price: Prices, max_states: int = 1 << 20) -> BoolArray:
    """Return the split of least makespan, by branch and bound, prices in whole picoseconds.

    Breadth first over experts, the most lopsided first: a partial split is dropped when another is
    at least as good on both sides, or when its Lagrangian bound (`weight` * device +
    (1 - `weight`) * host never exceeds the makespan) is not below the best split known. Raises
    UsageError where more than `max_states` partial splits were to be held at once.
    """
    best = beam_mask(price, _WIDE)
    best_ps = round(makespan(price, best) * _PS)
    is_free = np.isfinite(price.device_s)  # the others have no choice but the host
    order = is_free.nonzero()[0][lopsided_first(Prices(*(p[is_free] for p in price)))]
    device_ps, host_ps = _picoseconds(price.device_s[order]), _picoseconds(price.host_s[order])
    forced_ps = int(_picoseconds(price.host_s[~is_free]).sum())
    bits = _search(device_ps, host_ps, forced_ps, best_ps, max_states)
    if bits is not None:
        best = np.zeros(len(is_free), np.bool_)
        best[order] = bits
    return best


def _picoseconds(seconds: FloatArray) -> IntArray:
    return np.rint(seconds * _PS).astype(np.int64)


def _search(
    device_ps: IntArray, host_ps: IntArray, forced_ps: int, best_ps: int, max_states: int
) -> BoolArray | None:
    """Return the bits of the best split if it is better than `best_ps`, else None."""
    weight = _bound_weight(device_ps, host_ps, forced_ps)
    least = np.minimum(weight * device_ps, (1 - weight) * host_ps)
    rest_ps = np.concatenate([np.cumsum(least[::-1])[::-1], [0.0]])  # bound of what is undecided
    device, host = np.zeros(1, np.int64), np.full(1, forced_ps, np.int64)
    parents: list[IntArray] = []
    for place in range(len(device_ps)):
        num_states = len(device)
        device = np.concatenate([device + device_ps[place], device])
        host = np.concatenate([host, host + host_ps[place]])
        bound_ps = weight * device + (1 - weight) * host + rest_ps[place + 1]
        is_open = (np.maximum(device, host) < best_ps) & (bound_ps < best_ps - 0.5)
        keep = is_open.nonzero()[0]
        keep = keep[np.lexsort((host[keep], device[keep]))]
        keep = keep[_is_new_minimum(host[keep])]
        if not len(keep):
            return None
        if len(keep) > max_states:
            raise UsageError(
                f"The exact assignment of {len(device_ps)} experts needs more than {max_states} "
                "partial splits; allow more states or use the greedy or beam assignment."
            )
        device, host = device[keep], host[keep]
        parents.append(np.where(keep < num_states, keep, num_states - 1 - keep))
    return _backtrack(parents, int(np.maximum(device, host).argmin()))


def _bound_weight(device_ps: IntArray, host_ps: IntArray, forced_ps: int) -> float:
    """Return the weight whose Lagrangian bound is highest: one of its breakpoints."""
    total = device_ps + host_ps
    weights = np.unique(host_ps[total > 0] / total[total > 0])
    if not len(weights):
        return 0.5
    least = np.minimum(weights[:, None] * device_ps, (1 - weights[:, None]) * host_ps)
    return float(weights[(least.sum(axis=1) + (1 - weights) * forced_ps).argmax()])


def _is_new_minimum(values: IntArray) -> BoolArray:
    """Mark the values below all before them: the states that no other one dominates."""
    is_new = np.ones(len(values), np.bool_)
    is_new[1:] = values[1:] < np.minimum.accumulate(values)[:-1]
    return is_new


def _backtrack(parents: list[IntArray], state: int) -> BoolArray:
    """Follow a state to its choices.

    A parent p >= 0 chose the device and came from state p, else the host and state -1 - p.
    """
    bits = np.empty(len(parents), np.bool_)
    for place in range(len(parents) - 1, -1, -1):
        parent = int(parents[place][state])
        bits[place] = parent >= 0
        state = parent if parent >= 0 else -1 - parent
    return bits
