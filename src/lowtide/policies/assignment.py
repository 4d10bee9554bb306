"""Assignment: who computes each activated expert of a layer, the device or the host.

Pure decisions. All of these share one cost model (DALI, Eqs. 3-6): a side's time is the sum over
its experts, the layer's time is the slower side's, and an expert on the device takes the longer
of its transfer and its computation, since the two overlap along a stream of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import add
from typing import NamedTuple, Protocol

import numpy as np

from lowtide.core import Assignment, BoolArray, Costs, Demand, FloatArray, IntArray
from lowtide.errors import PlanError, UsageError


class Assign(Protocol):
    """Decides for one layer's step."""

    def __call__(
        self,
        layer: int,
        demand: Demand,
        arriving_s: FloatArray | None = None,
        link_s: float = 0.0,
    ) -> Assignment:
        """Every activated expert once.

        `arriving_s` [len(demand.experts)]: seconds until an expert that is on its way (or staged)
        can be used, infinite where nothing is under way; None means nothing at all is. `link_s`:
        seconds until the link is free for a fetch.
        """
        ...


class Prices(NamedTuple):
    """Seconds that each activated expert would add to either side. [num_activated]"""

    device_s: FloatArray  # infinite where the device cannot have the expert
    host_s: FloatArray


def prices(costs: Costs, demand: Demand, arriving_s: FloatArray | None = None) -> Prices:
    """DALI's t_gpu (with Eq. 6's transfer: none for residents) and t_cpu.

    An expert on its way costs what remains of its transfer. Without staging slots an absent
    expert cannot come to the device. On a machine whose experts live on disk, a read runs beside
    the transfer or the computation that it feeds.
    """
    transfer_s = np.where(demand.is_resident, 0.0, costs.fetch_s if costs.num_staging else np.inf)
    if arriving_s is not None:
        transfer_s = np.minimum(transfer_s, arriving_s)
    host_s = costs.host_s(demand.num_tokens)
    if costs.disk_read_s:
        host_s = np.maximum(host_s, costs.disk_read_s)
    return Prices(np.maximum(transfer_s, costs.device_s(demand.num_tokens)), host_s)


def makespan(price: Prices, mask: BoolArray) -> float:
    """Seconds of the slower side; `mask` [num_activated]: who is on the device."""
    return max(float(price.device_s[mask].sum()), float(price.host_s[~mask].sum()))


def is_on_device(demand: Demand, assignment: Assignment) -> BoolArray:
    """Per activated expert: whether `assignment` leaves it to the device."""
    mask: BoolArray = np.isin(demand.experts, assignment.host, invert=True)
    return mask


def divide(demand: Demand, mask: BoolArray) -> Assignment:
    """The experts under `mask` [num_activated] to the device, the others to the host."""
    experts = demand.experts
    return Assignment(
        experts[mask & demand.is_resident], experts[mask & ~demand.is_resident], experts[~mask]
    )


def is_here(demand: Demand, arriving_s: FloatArray | None) -> BoolArray:
    """Per activated expert: whether it is resident, or prefetched and arrived."""
    if arriving_s is None:
        return demand.is_resident
    return demand.is_resident | (arriving_s <= 0.0)


def break_even_tokens(costs: Costs, max_tokens: int = 1 << 14) -> int:
    """The least count from which fetching an expert is not slower than computing it at home.

    `max_tokens + 1` when there is none: nothing is ever fetched.
    """
    num_tokens = np.arange(1, max_tokens + 1)
    demand = Demand(num_tokens, num_tokens, np.zeros(max_tokens, np.bool_))
    price = prices(costs, demand)
    pays = price.device_s <= price.host_s
    return int(pays.argmax()) + 1 if pays.any() else max_tokens + 1


class Greedy:
    """DALI, Algorithm 1: the most lopsided experts first, each to the side that ends sooner.

    Sorted by |t_gpu - t_cpu|, largest first (equals by id); ties between the sides go to the
    device. No memory limit, as printed: staging slots come free as experts finish. Never slower
    than twice the optimum: each choice adds at most min(t_gpu, t_cpu), and the sum of those is at
    most twice the optimum (Ibarra and Kim, 1977, for unrelated machines).

    Several devices are as many sides, t_gpu the least of theirs, and ties go to the first; the
    bound is then the number of sides. Only the device that has an expert, or awaits it, can run
    it; an absent one is fetched to the device it was given to.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._each = costs.each

    def __call__(
        self,
        layer: int,
        demand: Demand,
        arriving_s: FloatArray | None = None,
        link_s: float = 0.0,
    ) -> Assignment:
        if demand.device_of is None:
            return divide(demand, greedy_mask(prices(self._costs, demand, arriving_s)))
        sides_s = prices_by_side(self._each, self._costs.num_devices, demand, arriving_s)
        side_of = greedy_sides(sides_s)
        mask = side_of < self._costs.num_devices
        return divide(demand, mask)._replace(fetch_on=side_of[mask & ~demand.is_resident])


def prices_by_side(
    costs: Costs, num_devices: int, demand: Demand, arriving_s: FloatArray | None = None
) -> FloatArray:
    """Seconds that each activated expert would add to each device and, at last, to the host.

    costs: of one device. [num_devices + 1, num_activated]
    """
    price, device_of = prices(costs, demand, arriving_s), demand.device_of
    if device_of is None:
        raise UsageError("An assignment to several devices must be told who is on which.")
    can_run = [(device_of < 0) | (device_of == device) for device in range(num_devices)]
    return np.stack([*(np.where(can, price.device_s, np.inf) for can in can_run), price.host_s])


def greedy_sides(sides_s: FloatArray) -> IntArray:
    """Algorithm 1 over any number of devices and the host: the side that each expert is given to.

    sides_s [num_devices + 1, num_activated], the host last.
    """
    order = _lopsided_first(Prices(sides_s[:-1].min(axis=0), sides_s[-1]))
    totals_s = [0.0] * len(sides_s)
    picks: list[int] = []
    for added_s in sides_s[:, order].T.tolist():
        ends_s = list(map(add, totals_s, added_s))
        side = ends_s.index(min(ends_s))
        totals_s[side] = ends_s[side]
        picks.append(side)
    side_of = np.empty(len(order), np.int64)
    side_of[order] = picks
    return side_of


def greedy_mask(price: Prices) -> BoolArray:
    """Algorithm 1 on prices: True where the device gets the expert."""
    order = _lopsided_first(price)
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


class Balance:
    """Ours: like `Greedy`, but the link works beside the device instead of being added to it.

    Residents start on the device. Absent experts stand in a queue, those on their way first, then
    by tokens: a transfer costs the same for many tokens as for one, the host does not. The device
    takes from the front what the link, after all it has begun, brings; the host takes from the
    back; whichever would be done sooner takes next. At last residents that cost the host least
    for what they spare the device go over to a host that is idle.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs

    def __call__(
        self,
        layer: int,
        demand: Demand,
        arriving_s: FloatArray | None = None,
        link_s: float = 0.0,
    ) -> Assignment:
        costs, is_resident = self._costs, demand.is_resident
        compute_s, host_s = costs.device_s(demand.num_tokens), costs.host_s(demand.num_tokens)
        if costs.disk_read_s:
            host_s = np.maximum(host_s, costs.disk_read_s)
        residents, absent = is_resident.nonzero()[0], (~is_resident).nonzero()[0]
        resident_s = compute_s[residents]
        due_s = np.full(len(absent), np.inf) if arriving_s is None else arriving_s[absent]
        absent, due_s = _queued(absent, demand.num_tokens, due_s)
        num_fetched, device_end_s, host_end_s = self._share(
            compute_s[absent].tolist(),
            host_s[absent].tolist(),
            due_s.tolist(),
            float(resident_s.sum()),
            link_s,
        )
        mask = is_resident.copy()
        mask[absent[:num_fetched]] = True
        if host_end_s < device_end_s:
            order = (host_s[residents] / resident_s).argsort(kind="stable")
            relieved = _num_relieved(
                resident_s[order].tolist(),
                host_s[residents[order]].tolist(),
                device_end_s,
                host_end_s,
            )
            mask[residents[order[:relieved]]] = False
        return divide(demand, mask)

    def _share(
        self,
        compute_s: list[float],
        host_s: list[float],
        due_s: list[float],
        device_end_s: float,
        link_end_s: float,
    ) -> tuple[int, float, float]:
        """How many go to the device, from the front; when the device and the host end."""
        fetch_s = self._costs.fetch_s if self._costs.num_staging else np.inf
        rest_s = _from_the_back(host_s)
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


class Beam:
    """The greedy order with the `width` best partial splits kept instead of one.

    Better than `Greedy` and many times slower: for comparison.
    """

    def __init__(self, costs: Costs, width: int = 2) -> None:
        if width < 1:
            raise UsageError(f"A beam needs a width of at least 1, not {width}.")
        self._costs = costs
        self._width = width

    def __call__(
        self,
        layer: int,
        demand: Demand,
        arriving_s: FloatArray | None = None,
        link_s: float = 0.0,
    ) -> Assignment:
        return divide(demand, beam_mask(prices(self._costs, demand, arriving_s), self._width))


def beam_mask(price: Prices, width: int) -> BoolArray:
    """Beam search on prices, never worse than `greedy_mask`."""
    order = _lopsided_first(price)
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


class Exact:
    """The least makespan, by branch and bound; for comparison, not for the hot path.

    Prices are rounded to whole picoseconds. Breadth first over experts, the most lopsided first:
    a partial split is dropped when another is at least as good on both sides, or when its
    Lagrangian bound (`weight` * device + (1 - `weight`) * host never exceeds the makespan) is not
    below the best split known.
    """

    def __init__(self, costs: Costs, max_states: int = 1 << 20) -> None:
        """`max_states`: partial splits held at once, at most; beyond it UsageError is raised."""
        self._costs = costs
        self._max_states = max_states

    def __call__(
        self,
        layer: int,
        demand: Demand,
        arriving_s: FloatArray | None = None,
        link_s: float = 0.0,
    ) -> Assignment:
        price = prices(self._costs, demand, arriving_s)
        return divide(demand, exact_mask(price, self._max_states))


def exact_mask(price: Prices, max_states: int = 1 << 20) -> BoolArray:
    """The optimal split of `price` (in whole picoseconds)."""
    best = beam_mask(price, width=8)
    best_ps = round(makespan(price, best) * _PS)
    is_free = np.isfinite(price.device_s)  # the others have no choice but the host
    order = is_free.nonzero()[0][_lopsided_first(Prices(*(p[is_free] for p in price)))]
    device_ps, host_ps = _picoseconds(price.device_s[order]), _picoseconds(price.host_s[order])
    forced_ps = int(_picoseconds(price.host_s[~is_free]).sum())
    bits = _search(device_ps, host_ps, forced_ps, best_ps, max_states)
    if bits is not None:
        best = np.zeros(len(is_free), np.bool_)
        best[order] = bits
    return best


class AllFetch:
    """Everything on the device: residents where they are, absent experts fetched."""

    def __init__(self, costs: Costs) -> None:
        if not costs.num_staging:
            raise PlanError(
                "Fetching absent experts needs at least 1 staging slot and there is none; raise "
                "--gpu-memory or choose a policy that computes them on the host, such as tide."
            )

    def __call__(
        self,
        layer: int,
        demand: Demand,
        arriving_s: FloatArray | None = None,
        link_s: float = 0.0,
    ) -> Assignment:
        return divide(demand, np.ones(len(demand.experts), np.bool_))


class AllHost:
    """Residents on the device, absent experts on the host (TIDE, at every step).

    A prefetched expert that has arrived counts as resident, here and for the thresholds below.
    """

    def __call__(
        self,
        layer: int,
        demand: Demand,
        arriving_s: FloatArray | None = None,
        link_s: float = 0.0,
    ) -> Assignment:
        return divide(demand, is_here(demand, arriving_s))


class Fiddler:
    """Residents on the device; an absent expert on the host, or wherever it alone ends sooner.

    With `by_threshold` each absent expert is compared by itself: transfer, then computation on
    the device, against the host. What the others do is not considered.
    """

    def __init__(self, costs: Costs, by_threshold: bool = False) -> None:
        self._costs = costs
        self._by_threshold = by_threshold

    def __call__(
        self,
        layer: int,
        demand: Demand,
        arriving_s: FloatArray | None = None,
        link_s: float = 0.0,
    ) -> Assignment:
        mask = is_here(demand, arriving_s)
        if self._by_threshold:
            costs = self._costs
            device_s = costs.device_s(demand.num_tokens)
            device_s += costs.fetch_s if costs.num_staging else np.inf
            mask = mask | (device_s < costs.host_s(demand.num_tokens))
        return divide(demand, mask)


class HybriMoEThreshold:
    """Residents on the device; an absent expert is fetched from `min_tokens` tokens upwards.

    The static threshold that DALI compares itself with. By default the count from which a fetch
    is not slower than the host.
    """

    def __init__(self, costs: Costs, min_tokens: int | None = None) -> None:
        self.min_tokens = break_even_tokens(costs) if min_tokens is None else min_tokens
        self._can_fetch = costs.num_staging > 0

    def __call__(
        self,
        layer: int,
        demand: Demand,
        arriving_s: FloatArray | None = None,
        link_s: float = 0.0,
    ) -> Assignment:
        mask = is_here(demand, arriving_s)
        if self._can_fetch:
            mask = mask | (demand.num_tokens >= self.min_tokens)
        return divide(demand, mask)


class HybriMoEGreedy:
    """HybriMoE's released code: one queue, which the device empties from its front and the host
    from its back, whoever would end sooner taking its next.

    In the queue stand residents, then absent experts, each with most tokens first. An absent
    expert on the device waits for the link, which brings one after another. Ties go to the device.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs

    def __call__(
        self,
        layer: int,
        demand: Demand,
        arriving_s: FloatArray | None = None,
        link_s: float = 0.0,
    ) -> Assignment:
        here, costs = is_here(demand, arriving_s), self._costs
        queue = np.lexsort((-demand.num_tokens, ~here))
        fetch_s = costs.fetch_s if costs.num_staging else np.inf
        num_taken = _two_ended(
            costs.device_s(demand.num_tokens)[queue].tolist(),
            costs.host_s(demand.num_tokens)[queue].tolist(),
            np.where(here, 0.0, fetch_s)[queue].tolist(),
        )
        mask = np.zeros(len(queue), np.bool_)
        mask[queue[:num_taken]] = True
        return divide(demand, mask)


class LayerSplit:
    """Whole layers on one side (llama.cpp, KTransformers), whatever each expert would cost."""

    def __init__(self, is_device_layer: Sequence[bool]) -> None:
        self._is_device_layer = is_device_layer

    def __call__(
        self,
        layer: int,
        demand: Demand,
        arriving_s: FloatArray | None = None,
        link_s: float = 0.0,
    ) -> Assignment:
        return divide(demand, np.full(len(demand.experts), self._is_device_layer[layer], np.bool_))


_PS = 1e12  # picoseconds in a second


def _two_ended(device_s: list[float], host_s: list[float], fetch_s: list[float]) -> int:
    """How many of a queue the device has taken from the front when it meets the host."""
    device_end_s = link_end_s = 0.0
    rest_s = _from_the_back(host_s)
    for front, expert_s in enumerate(device_s):
        link_end_s += fetch_s[front]
        start_s = max(device_end_s, link_end_s) if fetch_s[front] else device_end_s
        device_end_s = start_s + expert_s
        if device_end_s > rest_s[front]:
            return front
    return len(device_s)


def _from_the_back(host_s: list[float]) -> list[float]:
    """When the host, working from the end of a queue, would be through with each of it.

    The device, working from the front, takes an expert if it is done with it by then: until then
    the host takes the others, and never comes to this one.
    """
    rest_s = list(accumulate(reversed(host_s)))
    rest_s.reverse()
    return rest_s


def _queued(
    absent: IntArray, num_tokens: IntArray, due_s: FloatArray
) -> tuple[IntArray, FloatArray]:
    """Absent experts as `Balance` queues them: the soonest due, then those with most tokens."""
    order = (-num_tokens[absent]).argsort(kind="stable")
    if len(due_s) and due_s[due_s.argmin()] < np.inf:  # is any on its way
        order = order[due_s[order].argsort(kind="stable")]
    return absent[order], due_s[order]


def _num_relieved(
    device_s: list[float], host_s: list[float], device_end_s: float, host_end_s: float
) -> int:
    """How many residents, in order, to move to the host while the layer ends sooner by it."""
    for place, (spared_s, added_s) in enumerate(zip(device_s, host_s, strict=True)):
        host_end_s += added_s
        if host_end_s >= device_end_s:
            return place
        device_end_s -= spared_s
    return len(device_s)


def _lopsided_first(price: Prices) -> IntArray:
    order: IntArray = np.argsort(-np.abs(price.device_s - price.host_s), kind="stable")
    return order


def _picoseconds(seconds: FloatArray) -> IntArray:
    return np.rint(seconds * _PS).astype(np.int64)


def _search(
    device_ps: IntArray, host_ps: IntArray, forced_ps: int, best_ps: int, max_states: int
) -> BoolArray | None:
    """Bits of a split that is better than `best_ps`, the best there is; None if there is none."""
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
    """The weight whose Lagrangian bound is highest: one of its breakpoints."""
    total = device_ps + host_ps
    weights = np.unique(host_ps[total > 0] / total[total > 0])
    if not len(weights):
        return 0.5
    least = np.minimum(weights[:, None] * device_ps, (1 - weights[:, None]) * host_ps)
    return float(weights[(least.sum(axis=1) + (1 - weights) * forced_ps).argmax()])


def _is_new_minimum(values: IntArray) -> BoolArray:
    """Whether each value is below all before it: the states that no other one dominates."""
    is_new = np.ones(len(values), np.bool_)
    is_new[1:] = values[1:] < np.minimum.accumulate(values)[:-1]
    return is_new


def _backtrack(parents: list[IntArray], state: int) -> BoolArray:
    """A parent p >= 0 chose the device and came from state p, else the host and state -1 - p."""
    bits = np.empty(len(parents), np.bool_)
    for place in range(len(parents) - 1, -1, -1):
        parent = int(parents[place][state])
        bits[place] = parent >= 0
        state = parent if parent >= 0 else -1 - parent
    return bits
