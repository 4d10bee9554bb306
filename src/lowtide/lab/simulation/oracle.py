"""The preset `oracle`, which knows the future: a ceiling for other presets.

Belady's replacement with bypass: it admits only what a step demands, chooses its first residents,
and keeps the experts wanted soonest. Only a replay knows the future; the engine has no such preset.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowtide.core import BoolArray, Facts, FloatArray, IntArray, Step
from lowtide.policies.assignment import Balance
from lowtide.policies.placement import Placement, favourites
from lowtide.policies.ranks import Ranks
from lowtide.policies.recipe import PolicyInputs, Recipe


def oracle(hits: IntArray) -> Recipe:
    """Make the preset that knows these passes [passes, layers, experts] in advance.

    Each layer keeps in its own slots the experts wanted soonest; absent ones are assigned as by
    `lowtide`.
    """

    def place(inputs: PolicyInputs) -> Placement:
        return Oracle(hits, inputs.capacity)

    return Recipe(place, lambda s: Balance())


class Oracle(Placement):
    """Belady's replacement, layer by layer, among those that the step fetches."""

    def __init__(self, hits: IntArray, capacity: Sequence[int]) -> None:
        super().__init__(*hits.shape[1:])
        self._worth = iter(_worth(following_uses(hits)))
        self._first = _worth(first_uses(hits))
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
    """Return a value that is higher the sooner an expert is wanted, and 0 if never."""
    is_wanted = np.isfinite(when)
    last = when.max(where=is_wanted, initial=0.0)
    worth: FloatArray = np.where(is_wanted, last + 1 - when, 0.0)
    return worth


def following_uses(hits: IntArray) -> FloatArray:
    """Return when each expert is wanted next, after each pass; infinite if never."""
    num_layers = hits.shape[1]
    following = np.empty(hits.shape)
    then = np.full(hits.shape[1:], np.inf)
    for number in range(len(hits) - 1, -1, -1):
        following[number] = then
        time = number * num_layers + np.arange(num_layers)[:, None]
        then = np.where(hits[number] > 0, time, then)
    return following


def first_uses(hits: IntArray) -> FloatArray:
    """Return when each expert is first wanted, [layers, experts]."""
    is_used = hits > 0
    time = is_used.argmax(axis=0) * hits.shape[1] + np.arange(hits.shape[1])[:, None]
    first: FloatArray = np.where(is_used.any(axis=0), time, np.inf)
    return first
