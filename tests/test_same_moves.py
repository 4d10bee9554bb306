"""Each placement's decisions without a device, against a rule that is asked layer by layer.

The rule is that of its paper or its docstring: sets, sorted for each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from lowtide.core import BoolArray, FloatArray, IntArray, Step, StepKind
from lowtide.lab.baselines import Frequency, ScoreCache
from lowtide.policies.placement import LRU, DaliWindow, Placement, Static, Tide
from lowtide.policies.ranks import admit

NUM_LAYERS, NUM_EXPERTS = 2, 8
COUNTS = np.array([[5, 0, 9, 9, 1, 2, 2, 0], [0, 0, 0, 0, 0, 0, 0, 0]], np.float64)


class Asked(NamedTuple):
    """Facts given to an old rule: of one layer in one pass."""

    step: Step
    number: int  # of the pass, from 0
    layer: int
    hits: IntArray
    is_kept: BoolArray
    room: int

    @property
    def is_demanded(self) -> BoolArray:
        return self.hits > 0

    def best(self, score: FloatArray | IntArray, candidates: BoolArray) -> set[int]:
        """As many as there is room for; residents, then lower ids, win ties."""
        ids = candidates.nonzero()[0].tolist()
        return set(sorted(ids, key=lambda e: (-score[e], not self.is_kept[e], e))[: self.room])

    def at_most(self, score: FloatArray | IntArray) -> set[int]:
        """Of least score, lower ids leave first."""
        ids = self.is_kept.nonzero()[0].tolist()
        leaving = sorted(ids, key=lambda e: (score[e], e))[: max(0, len(ids) - self.room)]
        return set(ids) - set(leaving)


Rule = Callable[[Asked], set[int]]


def best_of(orders: list[list[int]]) -> Rule:
    """The first ones for whom there is room, once they are read; till then those who were here."""

    def rule(asked: Asked) -> set[int]:
        worth = np.zeros(NUM_EXPERTS)
        order = orders[asked.layer][: asked.room]
        worth[order] = range(len(order), 0, -1)
        return asked.best(worth, asked.is_kept | (asked.is_demanded & (worth > 0)))

    return rule


def static() -> Rule:
    return best_of([list(range(5))] * NUM_LAYERS)


def favourite() -> Rule:
    return best_of((-COUNTS).argsort(axis=1, kind="stable").tolist())


def lru() -> Rule:
    last_use = np.full((NUM_LAYERS, NUM_EXPERTS), -1)
    uses = iter(range(10**6))

    def rule(asked: Asked) -> set[int]:
        for expert in asked.is_demanded.nonzero()[0]:
            last_use[asked.layer, expert] = next(uses)
        return asked.best(last_use[asked.layer], asked.is_kept | asked.is_demanded)

    return rule


def tide(starts_empty: bool) -> Rule:
    def rule(asked: Asked) -> set[int]:
        is_left_out = starts_empty and asked.step.kind is StepKind.PREFILL
        if not is_left_out and asked.step.index % 3 == 0:
            return asked.best(asked.hits, asked.is_kept | asked.is_demanded)
        return asked.at_most(asked.hits)

    return rule


def frequency() -> Rule:
    counts = COUNTS.copy()

    def rule(asked: Asked) -> set[int]:
        counts[asked.layer] += asked.is_demanded
        return asked.best(counts[asked.layer], asked.is_kept | asked.is_demanded)

    return rule


def score() -> Rule:
    means = np.zeros((NUM_LAYERS, NUM_EXPERTS))

    def rule(asked: Asked) -> set[int]:
        means[asked.layer] *= 0.5
        means[asked.layer] += 0.5 * asked.hits / max(1, asked.hits.sum())
        return asked.best(means[asked.layer], asked.is_kept | asked.is_demanded)

    return rule


def dali(always: bool) -> Rule:
    """With no room lost, since a swap follows that loss now. always: as the paper prints it."""
    scores = np.zeros((NUM_LAYERS, NUM_EXPERTS), np.int64)

    def rule(asked: Asked) -> set[int]:
        now, kept = scores[asked.layer], set(asked.is_kept.nonzero()[0].tolist())
        now += asked.hits
        if asked.number % 2 == 0:
            return kept
        absent = [e for e in range(NUM_EXPERTS) if e not in kept and (always or now[e] > 0)]
        entering = sorted(absent, key=lambda e: (-now[e], e))[:3]
        num_free = asked.room - len(kept)
        leaving = sorted(kept, key=lambda e: (now[e], e))
        pairs = zip(entering[num_free:], leaving, strict=False)
        swaps = [(e, r) for e, r in pairs if always or now[e] > now[r]]
        entering = entering[: num_free + len(swaps)]
        now[:] = 0
        # Nobody is read who is not demanded: as many of those who were to leave stay.
        coming = {e for e in entering if asked.hits[e]}
        evicted = sorted(r for _, r in swaps)[len(entering) - len(coming) :]
        return kept - set(evicted) | coming

    return rule


MADE: dict[str, tuple[Callable[[list[int]], Placement], Callable[[], Rule]]] = {
    "static": (lambda room: Static([np.arange(5)] * 2, NUM_EXPERTS, room), static),
    "favourites": (lambda room: Static.favourites(room, COUNTS), favourite),
    "lru": (lambda room: LRU(NUM_LAYERS, NUM_EXPERTS), lru),
    "tide": (lambda room: Tide(NUM_LAYERS, NUM_EXPERTS, 3), lambda: tide(False)),
    "tide, empty": (lambda room: Tide(NUM_LAYERS, NUM_EXPERTS, 3, True), lambda: tide(True)),
    "frequency": (lambda room: Frequency(room, COUNTS), frequency),
    "score": (lambda room: ScoreCache(room, NUM_EXPERTS), score),
    "dali": (lambda room: DaliWindow(room, NUM_EXPERTS, 2, 3, seed=1), lambda: dali(True)),
    "dali, better": (
        lambda room: DaliWindow(room, NUM_EXPERTS, 2, 3, seed=1, always=False),
        lambda: dali(False),
    ),
}
rooms = st.lists(st.integers(0, NUM_EXPERTS), min_size=NUM_LAYERS, max_size=NUM_LAYERS)
tokens = st.lists(st.integers(0, 3), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS)
passes = st.tuples(
    st.builds(Step, st.sampled_from(StepKind), st.integers(0, 7)),
    st.lists(tokens, min_size=NUM_LAYERS, max_size=NUM_LAYERS),
    st.none() | rooms,
)


@pytest.mark.parametrize("name", MADE)
@examples(80)
@given(room=rooms, trace=st.lists(passes, max_size=12))
def test_decisions_are_those_of_the_rule(name: str, room: list[int], trace: list) -> None:
    make, make_rule = MADE[name]
    placement, rule = make(room), make_rule()
    is_kept = np.zeros((NUM_LAYERS, NUM_EXPERTS), np.bool_)
    for layer in range(NUM_LAYERS):
        is_kept[layer, placement.initial(layer)] = True
    for number, (step, all_tokens, new_room) in enumerate(trace):
        if new_room is not None and not name.startswith("dali"):
            room = new_room
        hits = np.array(all_tokens)
        ranks = placement.begin_pass(step, is_kept.sum(axis=1), np.array(room))
        for layer, now in enumerate(hits):
            wanted = rule(Asked(step, number, layer, now, is_kept[layer].copy(), room[layer]))
            experts = now.nonzero()[0]
            moves = admit(ranks, layer, experts, now[experts], is_kept[layer])
            is_kept[layer, moves.admit] = True
            is_kept[layer, moves.evict] = False
            assert set(is_kept[layer].nonzero()[0].tolist()) == wanted
        placement.end_pass(step, hits)
