"""Presets that others are compared with: published systems' policies, and the corners.

The engine finds them by name (`lowtide.registry`), as it finds a stranger's. Pure, as all policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product

import numpy as np

from lowtide.core import (
    Assignment,
    BoolArray,
    Costs,
    Facts,
    FloatArray,
    IntArray,
    Step,
    StepKind,
)
from lowtide.lab.best_assignments import Beam, Optimum
from lowtide.policies.assignment import AllFetch, divide, from_the_back, is_here
from lowtide.policies.catalogue import CATALOGUE, NUM_PREFETCH, TAU, first_experts, tau_of
from lowtide.policies.division import use_of
from lowtide.policies.online_tau import OnlineTau
from lowtide.policies.placement import Placement, Static, Tide, favourites
from lowtide.policies.prefetch import Ahead, NextGate, NoPrefetch, Prefetch
from lowtide.policies.ranks import Ranks
from lowtide.policies.recipe import PolicyInputs, Recipe, switch
from lowtide.policies.split import SHARES, Split, evenly, split_s

BY_THRESHOLD = switch("by_threshold")  # an expert that alone would end sooner is fetched
BY_GREEDY = switch("by_greedy")  # it assigns as its code does, not by a threshold
_SEARCH_PASSES = 32  # of a calibration, evenly spaced: enough to see the load


# Assignments


MOST_TOKENS = 1 << 14
"""Most tokens of an expert considered by `break_even_tokens`."""


def break_even_tokens(costs: Costs) -> int:
    """Return the least token count at which fetching is not slower than computing at home.

    `MOST_TOKENS + 1` if there is none: nothing is ever fetched.
    """
    num_tokens = np.arange(1, MOST_TOKENS + 1)
    fetched_s = np.maximum(costs.fetch_s, costs.device_s(num_tokens))
    can_fetch = costs.num_staging > 0
    pays = can_fetch & (fetched_s <= costs.at_home_s(num_tokens))
    return int(pays.argmax()) + 1 if pays.any() else MOST_TOKENS + 1


class Fiddler:
    """Residents on the device; an absent expert on the host, or wherever it alone ends sooner.

    With `by_threshold` each absent expert is judged alone: transfer and computation on the device
    against computation on the host, ignoring the other experts.
    """

    def __init__(self, by_threshold: bool = False) -> None:
        self._by_threshold = by_threshold

    def __call__(self, facts: Facts) -> Assignment:
        demand, mask = facts.demand, is_here(facts)
        if self._by_threshold and facts.can_fetch:
            costs = facts.costs
            device_s = costs.device_s(demand.num_tokens) + costs.fetch_s
            mask = mask | (device_s < costs.host_s(demand.num_tokens))
        return divide(demand, mask)


class HybriMoEThreshold:
    """Residents on the device; an absent expert is fetched from `min_tokens` tokens upwards.

    The static threshold that DALI compares itself with. By default the count from which a fetch
    is not slower than the host.
    """

    def __init__(self, costs: Costs, min_tokens: int | None = None) -> None:
        self.min_tokens = break_even_tokens(costs) if min_tokens is None else min_tokens

    def __call__(self, facts: Facts) -> Assignment:
        mask = is_here(facts)
        if facts.can_fetch:
            mask = mask | (facts.demand.num_tokens >= self.min_tokens)
        return divide(facts.demand, mask)


class HybriMoEGreedy:
    """HybriMoE's released code: device and host empty one queue from its two ends.

    The queue has residents, then absent experts, each by falling tokens. The device takes from the
    front, the host from the back; the side that would end sooner takes the next, and the device
    wins ties. An absent expert on the device waits for the link, which transfers one at a time.
    """

    def __call__(self, facts: Facts) -> Assignment:
        here, costs, demand = is_here(facts), facts.costs, facts.demand
        queue = np.lexsort((-demand.num_tokens, ~here))
        fetch_s = costs.fetch_s if facts.can_fetch else np.inf
        num_taken = _two_ended(
            costs.device_s(demand.num_tokens)[queue].tolist(),
            costs.host_s(demand.num_tokens)[queue].tolist(),
            np.where(here, 0.0, fetch_s)[queue].tolist(),
        )
        mask = np.zeros(len(queue), np.bool_)
        mask[queue[:num_taken]] = True
        return divide(demand, mask)


class LayerSplit:
    """Whole layers on one side (llama.cpp, KTransformers), whatever each expert would cost.

    The device's are those that have room for all their experts.
    """

    def __call__(self, facts: Facts) -> Assignment:
        is_whole = facts.room == len(facts.is_kept)
        if is_whole and not facts.can_fetch:  # its experts are not all here yet
            return divide(facts.demand, is_here(facts))
        return divide(facts.demand, np.full(len(facts.demand.experts), is_whole, np.bool_))


def _two_ended(device_s: list[float], host_s: list[float], fetch_s: list[float]) -> int:
    """Return the number of experts that the device takes from the front until it meets the host."""
    device_end_s = link_end_s = 0.0
    rest_s = from_the_back(host_s)
    for front, expert_s in enumerate(device_s):
        link_end_s += fetch_s[front]
        start_s = max(device_end_s, link_end_s) if fetch_s[front] else device_end_s
        device_end_s = start_s + expert_s
        if device_end_s > rest_s[front]:
            return front
    return len(device_s)


class FixedShare:
    """Residents on the device; a fixed share of the absent experts fetched, by ascending id.

    A prefetched expert that has arrived counts as resident.
    """

    def __init__(self, fetch_share: float) -> None:
        self._fetch_share = fetch_share

    def __call__(self, facts: Facts) -> Assignment:
        mask = is_here(facts)
        absent = (~mask).nonzero()[0]
        fetched = absent[: int(self._fetch_share * len(absent))]
        return divide(facts.demand, mask | np.isin(np.arange(len(mask)), fetched))


class Favourites(Prefetch):
    """Always the most used experts that are not resident: no prediction."""

    def __init__(self, num_experts_ahead: int, frequency: FloatArray) -> None:
        """`frequency` [layers, experts]."""
        super().__init__(num_experts_ahead)
        self._frequency = frequency

    def score(self, ahead: Ahead) -> FloatArray:
        favourites: FloatArray = self._frequency[ahead.layer]
        return favourites


# Placements and prefetches


class Frequency(Placement):
    """Keeps the experts used most, in a calibration and since (EdgeMoE).

    EdgeMoE evicts by activation frequency and by how soon a layer runs again. Here each layer has
    slots of its own, so only the frequency matters. An expert of this step replaces a resident that
    is used less.
    """

    def __init__(self, capacity: Sequence[int], frequency: FloatArray) -> None:
        """`frequency` [layers, experts]: of one activation, 1."""
        super().__init__(*frequency.shape)
        self._capacity = capacity
        self._rank[:] = frequency

    def initial(self, layer: int) -> IntArray:
        return favourites(self._rank[layer], self._capacity[layer])

    def begin_pass(self, step: Step, num_residents: IntArray, capacity: IntArray) -> Ranks:
        return Ranks(self._rank, capacity, per_expert=1)


class ScoreCache(Placement):
    """Keeps the experts with the highest running score of activation (HybriMoE).

    The score is an exponential mean of an expert's share of the step's hits, with weight one half
    for the newest. (HybriMoE averages router scores; every router shows hits.) It starts with the
    first experts by id. Only experts that this step fetches may enter. Residents win ties.
    """

    def __init__(self, capacity: Sequence[int], num_experts: int) -> None:
        super().__init__(len(capacity), num_experts)
        self._capacity = capacity

    def initial(self, layer: int) -> IntArray:
        return np.arange(self._capacity[layer])

    def begin_pass(self, step: Step, num_residents: IntArray, capacity: IntArray) -> Ranks:
        self._rank *= 0.5
        return Ranks(self._rank, capacity, per_share=0.5)

    def may_enter(self, facts: Facts) -> BoolArray:
        is_fetched = np.zeros(len(facts.is_kept), np.bool_)
        is_fetched[facts.fetched] = True
        return is_fetched


class ReleasedTide(Tide):
    """TIDE as its released code has it, where that differs from the paper's text.

    The first experts by id are resident at the start, and every step of an answer's first block
    refreshes. Several answers at once, which that code does not have, refresh at the interval
    alone. (A refresh also waits for what it admits: `Recipe.waits`.)
    """

    def __init__(self, capacity: Sequence[int], num_experts: int, tau: int | OnlineTau) -> None:
        super().__init__(len(capacity), num_experts, tau)
        self._capacity = capacity
        self._requests: set[int] = set()  # of the last pass
        self._last_index = -1  # of the answer's denoising steps
        self._is_first_block = False

    def initial(self, layer: int) -> IntArray:
        return np.arange(self._capacity[layer])

    def refreshes(self, step: Step) -> bool:
        requests = {-1} if step.rows is None else set(step.rows.request.tolist())
        if requests.isdisjoint(self._requests):  # an answer begins
            self._last_index, self._is_first_block = -1, True
        self._requests = requests
        self._is_first_block &= len(requests) == 1 and step.kind is not StepKind.DECODE
        if step.kind is StepKind.DENOISE:  # each block begins its count again
            self._is_first_block &= step.index > self._last_index
            self._last_index = step.index
        return self._is_first_block or super().refreshes(step)


class Statistics(Prefetch):
    """Predicts experts that a calibration saw active together with the last layer's.

    EdgeMoE's activation statistics, as a first-order chain from layer to layer.
    """

    def __init__(self, num_experts_ahead: int, following: FloatArray) -> None:
        """`following` [layers - 1, experts, experts]: from `count_following`."""
        super().__init__(num_experts_ahead)
        total = following.sum(axis=2, keepdims=True)
        self._chance = following / np.maximum(total, 1e-30)
        num_experts = following.shape[1]
        self._num_tokens = np.zeros(num_experts)
        self._last = (-1, np.zeros(num_experts))

    def observe(self, facts: Facts) -> None:
        layer, demand = facts.layer, facts.demand
        if layer < len(self._chance):
            # With the experts that were not active: faster than picking the others' rows.
            num_tokens = self._num_tokens
            num_tokens.fill(0.0)
            num_tokens[demand.experts] = demand.num_tokens
            self._last = (layer, num_tokens.dot(self._chance[layer]))

    def score(self, ahead: Ahead) -> FloatArray:
        last_layer, expected = self._last
        return expected if last_layer == ahead.layer - 1 else np.zeros_like(expected)


# MoE-Lightning's plan: fixed residents, a fixed share of the absent experts fetched and the rest
# run on the host, and a fixed number of experts brought ahead, whichever takes least time.


def best_split(
    hits: IntArray, capacity: Sequence[int], frequency: FloatArray, costs: Costs, max_ahead: int
) -> Split:
    """Return the split with least `split_s`, over shares in quarters, with and without `max_ahead`.

    Among equals, the one with most residents and least transfers. hits [passes, layers, experts]:
    the load; frequency [layers, experts]: the order in which experts are kept and brought.
    """
    some, aheads = evenly(hits, _SEARCH_PASSES), sorted({0, max_ahead})
    splits = [Split(*parts) for parts in product(SHARES[::-1], SHARES, aheads)]
    return min(splits, key=lambda split: split_s(split, some, capacity, frequency, costs))


@lru_cache(maxsize=1)  # asked for by each of the preset's policies
def _best_split(inputs: PolicyInputs) -> Split:
    load, num_ahead = _load(inputs), NUM_PREFETCH.of(inputs)
    return best_split(load, inputs.capacity, use_of(load), inputs.costs, num_ahead)


def _load(inputs: PolicyInputs) -> IntArray:
    if inputs.hits is not None:
        return inputs.hits
    return np.ones((1, inputs.num_layers, inputs.num_experts), np.int64)


def _planned_capacity(inputs: PolicyInputs) -> list[int]:
    share = _best_split(inputs).resident_share
    return [round(share * slots) for slots in inputs.capacity]


def _planned_residents(inputs: PolicyInputs) -> Placement:
    return Static.favourites(inputs.capacity, use_of(_load(inputs)))


def _planned_prefetch(inputs: PolicyInputs) -> Prefetch:
    return Favourites(_best_split(inputs).num_ahead, use_of(_load(inputs)))


# Presets


def _no_experts(inputs: PolicyInputs) -> list[int]:
    return [0] * inputs.num_layers


def _best_known(inputs: PolicyInputs) -> Placement:
    """Keep the calibration's most used experts, else the first ones."""
    if inputs.frequency is None:
        return first_experts(inputs)
    return Static.favourites(inputs.capacity, inputs.frequency)


def _edgemoe(inputs: PolicyInputs) -> Placement:
    frequency = inputs.frequency
    if frequency is None:
        frequency = np.zeros((inputs.num_layers, inputs.num_experts))
    return Frequency(inputs.capacity, frequency)


def _statistics(inputs: PolicyInputs) -> Prefetch:
    if inputs.following is None:
        return NoPrefetch()
    return Statistics(NUM_PREFETCH.of(inputs), inputs.following)


def whole_layers(inputs: PolicyInputs) -> list[int]:
    """Make as many of the last layers complete as fit; the others keep nothing."""
    num_layers, num_experts = inputs.num_layers, inputs.num_experts
    num_whole = min(num_layers, sum(inputs.capacity) // num_experts)
    return [0] * (num_layers - num_whole) + [num_experts] * num_whole


# Nothing on the device; the host computes all experts.
ALL_HOST = Recipe(first_experts, capacity=_no_experts)
# Nothing stays; every expert is fetched and dropped.
ON_DEMAND = Recipe(first_experts, lambda s: AllFetch(), capacity=_no_experts, fetches_all=True)
# Keeps what a calibration used most and fetches the others.
STATIC = Recipe(_best_known, lambda s: AllFetch(), fetches_all=True)
# TIDE by its released code: each step of a first block refreshes, and waits for what it admits.
TIDE_RELEASED = Recipe(
    lambda s: ReleasedTide(s.capacity, s.num_experts, tau_of(s, waits=True)),
    options=(TAU,),
    waits=lambda s: True,
)
# DALI with the assignments that it compares its greedy with: the optimum, and a beam of two.
DALI_EXACT = replace(CATALOGUE["dali"], assignment=lambda s: Optimum())
DALI_BEAM = replace(CATALOGUE["dali"], assignment=lambda s: Beam())
# Fiddler: a static set, the others on the host.
FIDDLER = Recipe(
    _best_known,
    lambda s: Fiddler(BY_THRESHOLD.of(s)),
    options=(BY_THRESHOLD,),
)
# HybriMoE: score cache, token threshold, prefetch by the next gate.
HYBRIMOE = Recipe(
    lambda s: ScoreCache(s.capacity, s.num_experts),
    lambda s: HybriMoEGreedy() if BY_GREEDY.of(s) else HybriMoEThreshold(s.costs),
    lambda s: NextGate(NUM_PREFETCH.of(s)),
    options=(NUM_PREFETCH, BY_GREEDY),
)
# llama.cpp, KTransformers: whole layers on the device, whole layers on the host.
LAYER_SPLIT = Recipe(
    first_experts,
    lambda s: LayerSplit(),
    capacity=whole_layers,
)
# EdgeMoE: activation frequency, prefetch by activation statistics.
EDGEMOE = Recipe(
    _edgemoe, lambda s: AllFetch(), _statistics, options=(NUM_PREFETCH,), fetches_all=True
)
# MoE-Lightning: the best fixed split, searched before the run.
MOE_LIGHTNING = Recipe(
    _planned_residents,
    lambda s: FixedShare(_best_split(s).fetch_share),
    _planned_prefetch,
    options=(NUM_PREFETCH,),
    capacity=_planned_capacity,
)

COMPARED = ("lowtide", "tide", "dali", "fiddler", "hybrimoe", "lru", "layer-split")
"""Presets that comparisons show unless others are named."""
