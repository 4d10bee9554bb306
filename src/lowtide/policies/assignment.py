"""Assignment: decides whether the device or the host computes each activated expert.

Pure decisions. All share one cost model (DALI, Eqs. 3-6). A side's time is the sum over its
experts, and the layer's time is the slower side's. An expert on the device takes the longer of its
transfer and its computation, since the two overlap along a stream of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from lowtide.core import (
    NO_EXPERTS,
    Assignment,
    BoolArray,
    Demand,
    Facts,
    FloatArray,
    IntArray,
)

Assign = Callable[[Facts], Assignment]
"""Decides one layer's step: assigns every activated expert once."""


class Prices(NamedTuple):
    """Seconds that each activated expert would add to either side, [num_activated]."""

    device_s: FloatArray  # infinite where the device cannot have the expert
    host_s: FloatArray


def prices(facts: Facts) -> Prices:
    """Return DALI's t_gpu (with Eq. 6's transfer, none for residents) and t_cpu.

    An arriving expert costs the rest of its transfer. Without staging slots an absent expert cannot
    come to the device. On a machine whose experts live on disk, a read overlaps with the transfer
    or computation that it feeds.
    """
    costs, demand = facts.costs, facts.demand
    return Prices(np.maximum(_transfer_s(facts), costs.device_s(demand.num_tokens)), _host_s(facts))


def makespan(price: Prices, mask: BoolArray) -> float:
    """Return the slower side's seconds; `mask` [num_activated]: experts on the device."""
    return max(float(price.device_s[mask].sum()), float(price.host_s[~mask].sum()))


def divide(demand: Demand, mask: BoolArray) -> Assignment:
    """Assign the experts under `mask` [num_activated] to the device, the others to the host."""
    experts = demand.experts
    return Assignment(
        experts[mask & demand.is_resident], experts[mask & ~demand.is_resident], experts[~mask]
    )


def is_here(facts: Facts) -> BoolArray:
    """Mark the activated experts that are resident, or prefetched and arrived."""
    is_resident, arriving_s = facts.demand.is_resident, facts.arriving_s
    return is_resident if arriving_s is None else is_resident | (arriving_s <= 0.0)


class Greedy:
    """DALI, Algorithm 1: the most lopsided experts first, each to the side that ends sooner.

    Experts are sorted by |t_gpu - t_cpu|, largest first (equals by id); the device wins ties. As
    printed, there is no memory limit: staging slots become free as experts finish.

    It takes at most twice the optimal time: each choice adds at most min(t_gpu, t_cpu), and their
    sum is at most twice the optimum (Ibarra and Kim, 1977, for unrelated machines).
    """

    def __call__(self, facts: Facts) -> Assignment:
        return divide(facts.demand, greedy_mask(prices(facts)))


def greedy_mask(price: Prices) -> BoolArray:
    """Apply Algorithm 1 to prices; True where the device gets the expert."""
    order = lopsided_first(price)
    device_s = host_s = 0.0
    picks = bytearray(len(order))
    place = 0
    pairs = zip(price.device_s[order].tolist(), price.host_s[order].tolist(), strict=True)
    for expert_device_s, expert_host_s in pairs:
        device_end_s, host_end_s = device_s + expert_device_s, host_s + expert_host_s
        if device_end_s <= host_end_s:
            device_s = device_end_s
            picks[place] = 1
        else:
            host_s = host_end_s
        place += 1
    mask = np.empty(len(order), np.bool_)
    mask[order] = np.frombuffer(picks, np.bool_)
    return mask


def lopsided_first(price: Prices) -> IntArray:
    """Return the experts' positions in Algorithm 1's order."""
    order: IntArray = np.argsort(-np.abs(price.device_s - price.host_s), kind="stable")
    return order


class Balance:
    """Ours: like `Greedy`, but the link works in parallel to the device.

    Residents start on the device. Absent experts form a queue: arriving ones first, then by falling
    number of tokens, because a transfer costs the same for any number and the host's computation
    does not. The device takes from the front as the link delivers, the host from the back; the side
    that would finish sooner takes the next. Finally, if the host is idle, it takes over residents,
    cheapest first for what they save the device.

    The compiled twin is `kernels/cpu/balance.py`; both add in the same order.
    """

    def __call__(self, facts: Facts) -> Assignment:
        costs, demand, arriving_s = facts.costs, facts.demand, facts.arriving_s
        is_resident = demand.is_resident
        compute_s, host_s = costs.device_s(demand.num_tokens), _host_s(facts)
        residents, absent = is_resident.nonzero()[0], (~is_resident).nonzero()[0]
        resident_s = compute_s[residents]
        due_s = np.full(len(absent), np.inf) if arriving_s is None else arriving_s[absent]
        absent, due_s = _queued(absent, demand.num_tokens, due_s)
        num_fetched, device_end_s, host_end_s = _shared(
            compute_s[absent].tolist(),
            host_s[absent].tolist(),
            due_s.tolist(),
            float(resident_s.cumsum()[-1]) if len(residents) else 0.0,
            facts.link_s,
            costs.fetch_s if facts.can_fetch else np.inf,
        )
        mask = is_resident.copy()
        mask[absent[:num_fetched]] = True
        if host_end_s < device_end_s:
            relieved = _relieved(resident_s, host_s[residents], device_end_s, host_end_s)
            mask[residents[relieved]] = False
        return divide(demand, mask)


class AllFetch:
    """Everything on the device: residents in place, absent experts fetched."""

    def __call__(self, facts: Facts) -> Assignment:
        experts, _, is_resident = facts.demand
        return Assignment(experts[is_resident], experts[~is_resident], NO_EXPERTS)


class HostAlone:
    """Everything on the host, for a machine without a device."""

    def __call__(self, facts: Facts) -> Assignment:
        return Assignment(NO_EXPERTS, NO_EXPERTS, facts.demand.experts)


class AllHost:
    """Residents on the device, absent experts on the host (TIDE, at every step).

    A prefetched expert that has arrived counts as resident, as for every assignment.
    """

    def __call__(self, facts: Facts) -> Assignment:
        return divide(facts.demand, is_here(facts))


def _transfer_s(facts: Facts) -> FloatArray:
    """Return the seconds until each activated expert is on the device; infinite if never."""
    absent_s = facts.costs.fetch_s if facts.can_fetch else np.inf
    transfer_s: FloatArray = np.where(facts.demand.is_resident, 0.0, absent_s)
    return transfer_s if facts.arriving_s is None else np.minimum(transfer_s, facts.arriving_s)


def _host_s(facts: Facts) -> FloatArray:
    """Return the seconds of each activated expert on the host."""
    return facts.costs.at_home_s(facts.demand.num_tokens)


def _shared(
    compute_s: list[float],
    host_s: list[float],
    due_s: list[float],
    device_end_s: float,
    link_end_s: float,
    fetch_s: float,
) -> tuple[int, float, float]:
    """Return the number of absent experts that the device takes from the front, and both ends."""
    rest_s = from_the_back(host_s)
    for front, expert_s in enumerate(compute_s):
        is_coming = due_s[front] < np.inf
        here_s = due_s[front] if is_coming else link_end_s + fetch_s
        done_s = (here_s if here_s > device_end_s else device_end_s) + expert_s
        if done_s > rest_s[front]:
            return front, device_end_s, rest_s[front]
        device_end_s = done_s
        if not is_coming:
            link_end_s = here_s
    return len(compute_s), device_end_s, 0.0


def from_the_back(host_s: list[float]) -> list[float]:
    """Return when a host that works from a queue's end would finish each expert.

    The device, working from the front, takes an expert if it finishes it by then: until then the
    host is busy with the others, and never reaches this one.
    """
    rest_s = list(accumulate(reversed(host_s)))
    rest_s.reverse()
    return rest_s


def _queued(
    absent: IntArray, num_tokens: IntArray, due_s: FloatArray
) -> tuple[IntArray, FloatArray]:
    """Order absent experts for `Balance`: the soonest due, then those with most tokens."""
    order = (-num_tokens[absent]).argsort(kind="stable")
    if len(due_s) and due_s[due_s.argmin()] < np.inf:  # is any on its way
        order = order[due_s[order].argsort(kind="stable")]
    return absent[order], due_s[order]


def _relieved(
    device_s: FloatArray, host_s: FloatArray, device_end_s: float, host_end_s: float
) -> IntArray:
    """Return the positions of the residents that the host takes over from the device.

    They are those with the least seconds on the host for each second on the device, as many as
    let the layer end sooner.
    """
    order: IntArray = (host_s / device_s).argsort(kind="stable")
    seconds = zip(device_s[order].tolist(), host_s[order].tolist(), strict=True)
    for num_taken, (spared_s, added_s) in enumerate(seconds):
        host_end_s += added_s
        if host_end_s >= device_end_s:
            return order[:num_taken]
        device_end_s -= spared_s
    return order
