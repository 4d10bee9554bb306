"""MoE-Lightning's plan: the best of all splits, and what its parts do."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_facts import make_facts

from lowtide.core import Costs, Curve, Demand
from lowtide.lab.baselines import Favourites, FixedShare, best_split
from lowtide.policies.prefetch import Ahead
from lowtide.policies.presets import recipe
from lowtide.policies.recipe import PolicyInputs
from lowtide.policies.split import Split, split_s

COSTS = Costs(
    expert_bytes=10,
    link_s=8.0,
    host_s=Curve([(1, 3.0), (2, 6.0)]),
    device_s=Curve([(1, 1.0), (2, 2.0)]),
    dense_s=Curve([(1, 2.0)]),
    sync_s=0.0,
)
HITS = np.array([[[4, 0, 1, 1]], [[4, 2, 0, 1]]])  # [2 passes, 1 layer, 4 experts]
USE = np.array([[2.0, 1.0, 1.0, 2.0]])


def test_a_split_is_priced_by_its_slowest_side() -> None:
    # Experts 0 and 3 are resident (5 s); on the host 3 s, then 6 s.
    assert split_s(Split(1.0, 0.0, 0), HITS, [2], USE, COSTS) == (2 + 5) + (2 + 6)
    # One absent expert each: fetched, 8 s for the link, and 1 or 2 s more for the device.
    assert split_s(Split(1.0, 1.0, 0), HITS, [2], USE, COSTS) == (2 + 8) + (2 + 8)
    # Expert 1 comes ahead: resident in effect, but each pass lasts a transfer at least.
    assert split_s(Split(1.0, 0.0, 1), HITS, [2], USE, COSTS) == 8 + (2 + 7)
    assert split_s(Split(0.0, 0.0, 0), HITS, [2], USE, COSTS) == (2 + 18) + (2 + 21)


@given(
    link_s=st.floats(0.01, 50.0),
    capacity=st.integers(0, 4),
    num_ahead=st.integers(0, 2),
    seed=st.integers(0, 20),
)
def test_the_plan_is_the_best_of_all(
    link_s: float, capacity: int, num_ahead: int, seed: int
) -> None:
    costs = replace(COSTS, link_s=link_s)
    hits = np.random.default_rng(seed).integers(0, 5, (3, 2, 4))
    use = (hits > 0).sum(axis=0).astype(float)
    best = best_split(hits, [capacity] * 2, use, costs, num_ahead)
    shares = np.linspace(0, 1, 5)
    every = [Split(*parts) for parts in product(shares, shares, {0, num_ahead})]
    least = min(split_s(split, hits, [capacity] * 2, use, costs) for split in every)
    assert split_s(best, hits, [capacity] * 2, use, costs) == pytest.approx(least)


def test_the_machine_decides() -> None:
    fast = replace(COSTS, link_s=0.1, host_s=Curve([(1, 50.0)]))
    assert best_split(HITS, [1], USE, fast, 0).fetch_share == 1.0
    assert best_split(HITS, [1], USE, replace(COSTS, link_s=99.0), 2) == Split(1.0, 0.0, 0)
    no_staging = replace(fast, num_staging=0)
    assert best_split(HITS, [1], USE, no_staging, 0).fetch_share == 0.0


def test_a_fixed_share_is_fetched() -> None:
    demand = Demand(np.arange(6), np.ones(6, np.int64), np.arange(6) < 2)
    facts = make_facts(demand)
    work = FixedShare(0.5)(facts)
    assert (work.resident.tolist(), work.fetch.tolist(), work.host.tolist()) == (
        [0, 1],
        [2, 3],
        [4, 5],
    )
    arrived = np.array([np.inf] * 5 + [0.0])
    assert FixedShare(0.0)(facts._replace(arriving_s=arrived)).fetch.tolist() == [5]


def test_favourites_come_ahead() -> None:
    ahead = Favourites(1, np.array([[0.0, 5.0, 9.0]]))
    assert ahead.choose(Ahead(0, np.array([False, False, True]))).tolist() == [1]


def test_the_preset_holds_to_its_plan() -> None:
    setting = PolicyInputs([2], 4, COSTS, hits=HITS)
    policies = recipe("moe-lightning").policies(setting)
    assert policies.placement.initial(0).tolist() == [0, 3]
    assert policies.capacity.tolist() == [2]
    demand = Demand(np.array([0, 1]), np.array([4, 2]), np.array([True, False]))
    is_kept = np.array([True, False, False, True])
    moves = policies.placement.update(make_facts(demand, is_kept=is_kept))
    assert not len(moves.admit) and not len(moves.evict)
    blank = recipe("moe-lightning").policies(PolicyInputs([2], 4, COSTS))
    assert blank.placement.initial(0).tolist() == [0, 1]
