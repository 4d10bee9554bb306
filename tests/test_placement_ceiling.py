"""The ceiling of placements: optimal by enumeration, and never beaten."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from common.most_hits import most_hits
from hypothesis import given
from hypothesis import strategies as st

from lowtide.core import Costs, Curve, Facts, IntArray, Moves, Step, StepKind
from lowtide.errors import UsageError
from lowtide.lab.simulation.simulator import simulate
from lowtide.policies.catalogue import CATALOGUE
from lowtide.policies.decision import Decision, Policies
from lowtide.policies.presets import check_policy, preset_names, recipe
from lowtide.policies.recipe import PolicyInputs
from lowtide.replay.trace import Trace, TraceShape, TraceWriter

COSTS = Costs(
    expert_bytes=100,
    link_s=2.0,
    host_s=Curve([(1, 1.0)]),
    device_s=Curve([(1, 0.1)]),
    dense_s=Curve([(1, 0.5)]),
    sync_s=0.1,
)
NUM_TRACES = 1000
PRESETS = sorted(CATALOGUE.keys() - {"resident", "buddymoe"})  # they ignore room, or replace
AHEAD = {"lowtide", "dali", "dali-exact", "dali-beam"}
"""Presets that bring experts ahead of demand without a prefetch, since they move between steps."""
PER_TRACE = 2
"""Presets that a quick run tries on each trace."""


def make_trace(seed: int) -> Trace:
    """A few passes of one to three rows, with favourites and without."""
    draw = np.random.default_rng(seed)
    shape = TraceShape(int(draw.integers(1, 3)), int(draw.integers(3, 8)), 2)
    weight = draw.random(shape[:2]) ** draw.integers(0, 4)
    writer = TraceWriter("m", shape)
    for index in range(int(draw.integers(4, 12))):
        num_rows = int(draw.integers(1, 4))
        score = weight * draw.random((num_rows, *shape[:2]))
        ids = np.sort(np.argsort(-score, axis=2)[:, :, :2], axis=2)
        kind = StepKind.PREFILL if index == 0 and seed % 2 else StepKind.DECODE
        writer.append(Step(kind, max(0, index - seed % 2)), 0, ids, num_rows)
    return writer.trace()


class Ahead:
    """Experts that are resident though no step has asked for them yet.

    num_hits: experts that the first step to ask for them finds resident.
    """

    def __init__(self) -> None:
        self.waiting: set[tuple[int, int]] = set()
        self.num_hits = 0

    def note(self, facts: Facts, moves: Moves) -> None:
        layer, demand = facts.layer, facts.demand
        here = {(layer, e) for e in demand.experts[demand.is_resident].tolist()}
        self.num_hits += len(self.waiting & here)
        self.waiting -= {(layer, e) for e in (*demand.experts.tolist(), *moves.evict.tolist())}
        self.waiting |= {(layer, e) for e in np.setdiff1d(moves.admit, demand.experts).tolist()}


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Ahead:
    """Of all that is decided meanwhile."""
    found, moves = Ahead(), Policies.moves

    def noted(self: Policies, facts: Facts, decision: Decision) -> Moves:
        made = moves(self, facts, decision)
        found.note(facts, made)
        return made

    monkeypatch.setattr(Policies, "moves", noted)
    return found


@pytest.mark.parametrize(
    "num_presets", [PER_TRACE, pytest.param(len(PRESETS), marks=pytest.mark.slow)]
)
def test_no_preset_without_prefetch_has_more_hits_on_1000_traces(
    num_presets: int, ahead: Ahead
) -> None:
    """Some of the presets on each trace by turns, or every preset on every one.

    An expert that becomes resident though its step does not ask for it, as by a swap of DALI's
    window, comes ahead of demand as a prefetched one does: its first hit is counted apart.
    """
    draw = np.random.default_rng(0)
    for seed in range(NUM_TRACES):
        trace = make_trace(seed)
        hits, num_layers = trace.hits(), trace.shape.num_layers
        # Layers alike, or each with slots of its own.
        several = 1 if seed % 2 else num_layers
        capacity = draw.integers(0, trace.shape.num_experts + 1, several).tolist()
        capacity = capacity if several == num_layers else capacity * num_layers
        ceiling = most_hits(hits, sum(capacity))
        setting = PolicyInputs(capacity, trace.shape.num_experts, COSTS, hits=hits)
        setting = setting.having(num_prefetch=0, w_size=2, u_size=2)
        for place in range(num_presets):
            name = PRESETS[(seed * num_presets + place) % len(PRESETS)]
            ahead.waiting, ahead.num_hits = set(), 0
            num_hits = simulate(trace, name, setting, hits=hits).num_hits
            assert num_hits - ahead.num_hits <= ceiling, (seed, name)
            assert name in AHEAD or not ahead.num_hits, (seed, name)
        assert simulate(trace, "oracle", setting, hits=hits).num_hits <= ceiling


@given(seed=st.integers(0, 10**6), num_slots=st.integers(0, 3))
def test_most_hits_is_the_best_of_all_there_are(seed: int, num_slots: int) -> None:
    draw = np.random.default_rng(seed)
    hits = draw.integers(0, 2, (draw.integers(1, 5), draw.integers(1, 3), 3))
    assert most_hits(hits, num_slots) == _enumerated(hits, num_slots)


def _enumerated(hits: IntArray, num_slots: int) -> int:
    """By trying every set that may be kept after every layer's step."""
    num_layers, num_experts = hits.shape[1:]
    items = range(num_layers * num_experts)
    best = {
        frozenset(kept): 0 for size in range(num_slots + 1) for kept in combinations(items, size)
    }
    for layers in hits:
        for layer, counts in enumerate(layers):
            used = {layer * num_experts + e for e in np.flatnonzero(counts).tolist()}
            later: dict[frozenset[int], int] = {}
            for kept, num_hits in best.items():
                num_now = num_hits + len(kept & used)
                for size in range(min(num_slots, len(kept | used)) + 1):
                    for chosen in combinations(sorted(kept | used), size):
                        key = frozenset(chosen)
                        later[key] = max(later.get(key, 0), num_now)
            best = later
    return max(best.values())


def test_the_oracle_is_for_replays_only() -> None:
    assert "oracle" not in preset_names()
    for refuse in (lambda: check_policy("oracle", {}), lambda: recipe("oracle")):
        with pytest.raises(UsageError, match="knows the future"):
            refuse()
