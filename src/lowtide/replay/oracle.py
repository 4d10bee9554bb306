"""What hindsight knows: the most hits of any placement, and a preset that has the future.

Belady's replacement with leave to bypass. It admits only what a step demands, chooses its first
residents, and keeps those wanted soonest. Only a replay knows the future: the engine has no
such preset.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from lowtide.core import BoolArray, Facts, FloatArray, IntArray, Step
from lowtide.policies.assignment import Balance
from lowtide.policies.placement import Placement, favourites
from lowtide.policies.presets import ORACLE
from lowtide.policies.ranks import Ranks
from lowtide.policies.recipe import Recipe, Setting

__all__ = ["ORACLE", "most_hits", "oracle"]


def most_hits(hits: IntArray, num_slots: int) -> int:
    """Activated experts that can have been resident, at most, where all layers share the slots.

    hits [passes, layers, experts]. No placement that admits only what a step demands has more;
    one that brings experts ahead of demand, by a prefetch or by a swap between two steps, may have
    one more for each of them.
    """
    num_layers, num_experts = hits.shape[1:]
    uses = hits.reshape(len(hits) * num_layers, num_experts) > 0  # in the order of time
    following = _following(hits).reshape(uses.shape)
    first = _first_uses(hits)
    order = np.argsort(first, axis=None, kind="stable")[:num_slots]
    kept = {int(i): float(first.flat[i]) for i in order if np.isfinite(first.flat[i])}
    farthest = [(-when, item) for item, when in kept.items()]
    heapq.heapify(farthest)
    num_hits = 0
    for time, (is_used, then) in enumerate(zip(uses, following, strict=True)):
        base = time % num_layers * num_experts
        used = [(base + e, float(then[e])) for e in np.flatnonzero(is_used).tolist()]
        is_hit = [item in kept for item, _ in used]
        num_hits += sum(is_hit)
        # Those here first: who is not wanted again makes way for the others of the same step.
        for place in sorted(range(len(used)), key=lambda place: not is_hit[place]):
            _keep(kept, farthest, *used[place], num_slots)
    return num_hits


def oracle(hits: IntArray) -> Recipe:
    """The preset of a replay of these passes [passes, layers, experts]: each layer keeps, of its
    own slots, those wanted soonest; the absent are divided as `lowtide` does."""

    def place(setting: Setting) -> Placement:
        return Oracle(hits, setting.capacity)

    return Recipe(place, lambda s: Balance(), summary="knows the future: for replays only")


class Oracle(Placement):
    """Belady's replacement, layer by layer, among those that the step fetches."""

    def __init__(self, hits: IntArray, capacity: Sequence[int]) -> None:
        super().__init__(*hits.shape[1:])
        self._worth = iter(_worth(_following(hits)))
        self._first = _worth(_first_uses(hits))
        self._capacity = capacity

    def initial(self, layer: int) -> IntArray:
        num_used = int(np.count_nonzero(self._first[layer]))
        return favourites(self._first[layer], min(num_used, self._capacity[layer]))

    def begin_pass(self, step: Step, num_residents: IntArray, capacity: IntArray) -> Ranks:
        self._rank[:] = next(self._worth)
        return Ranks(self._rank, capacity)

    def may_enter(self, facts: Facts) -> BoolArray:
        is_fetched = np.zeros(len(facts.is_kept), np.bool_)
        is_fetched[facts.fetched] = True
        return is_fetched


def _worth(when: FloatArray) -> FloatArray:
    """More the sooner an expert is wanted; nothing if it never is. The shape of `when`."""
    is_wanted = np.isfinite(when)
    last = when.max(where=is_wanted, initial=0.0)
    worth: FloatArray = np.where(is_wanted, last + 1 - when, 0.0)
    return worth


def _following(hits: IntArray) -> FloatArray:
    """When each expert is wanted next, after each pass; infinite: never. The shape of `hits`."""
    num_layers = hits.shape[1]
    following = np.empty(hits.shape)
    then = np.full(hits.shape[1:], np.inf)
    for number in range(len(hits) - 1, -1, -1):
        following[number] = then
        time = number * num_layers + np.arange(num_layers)[:, None]
        then = np.where(hits[number] > 0, time, then)
    return following


def _first_uses(hits: IntArray) -> FloatArray:
    """When each expert is first wanted. [layers, experts]"""
    is_used = hits > 0
    time = is_used.argmax(axis=0) * hits.shape[1] + np.arange(hits.shape[1])[:, None]
    first: FloatArray = np.where(is_used.any(axis=0), time, np.inf)
    return first


def _keep(
    kept: dict[int, float],
    farthest: list[tuple[float, int]],
    item: int,
    when: float,
    num_slots: int,
) -> None:
    """Keeps the item just used, unless all who are kept are wanted sooner."""
    if not np.isfinite(when):
        kept.pop(item, None)
        return
    if item not in kept and len(kept) >= num_slots:
        while farthest and kept.get(farthest[0][1]) != -farthest[0][0]:
            heapq.heappop(farthest)  # has left, or has been used since
        if not farthest or -farthest[0][0] <= when:
            return
        del kept[heapq.heappop(farthest)[1]]
    kept[item] = when
    heapq.heappush(farthest, (-when, item))
