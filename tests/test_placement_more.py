"""DALI's window, HybriMoE's score, and lowtide's own placement."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_facts import make_facts

from lowtide.core import NO_EXPERTS, Costs, Curve, Demand, Moves, Step, StepKind
from lowtide.lab.baselines import ScoreCache
from lowtide.policies.budgets import Budgets
from lowtide.policies.division import layer_budgets
from lowtide.policies.lowtide import Lowtide
from lowtide.policies.online_tau import OnlineTau
from lowtide.policies.placement import DaliWindow, Placement

COSTS = Costs(
    expert_bytes=10,
    link_s=8.0,
    host_s=Curve([(1, 3.0), (2, 6.0)]),
    device_s=Curve([(1, 1.0)]),
    dense_s=Curve([(1, 2.0)]),
    sync_s=0.0,
)


def denoise(index: int) -> Step:
    return Step(StepKind.DENOISE, index)


class Layer:
    """One layer's residents, kept as a policy says."""

    def __init__(
        self, placement: Placement, num_experts: int, capacity: int, costs: Costs = COSTS
    ) -> None:
        self.placement = placement
        self.costs = costs
        self.capacity = capacity
        self.is_resident = np.zeros(num_experts, np.bool_)
        self.is_resident[placement.initial(0)] = True

    def step(self, index: int, tokens: list[int], fetched: list[int] | None = None) -> Moves:
        hits = np.array(tokens, np.int64)
        experts = np.flatnonzero(hits)
        demand = Demand(experts, hits[experts], self.is_resident[experts])
        facts = make_facts(
            demand,
            self.costs,
            step=denoise(index),
            is_kept=self.is_resident.copy(),
            capacity=[self.capacity],
            fetched=np.array(fetched or [], np.int64),
        )
        moves = self.placement.update(facts)
        assert not self.is_resident[moves.admit].any() and self.is_resident[moves.evict].all()
        self.is_resident[moves.admit] = True
        self.is_resident[moves.evict] = False
        assert self.is_resident.sum() <= self.capacity
        return moves

    @property
    def residents(self) -> list[int]:
        return [int(expert) for expert in np.flatnonzero(self.is_resident)]


def test_dali_swaps_after_a_full_window_and_no_earlier() -> None:
    window = DaliWindow([2], 4, w_size=2, u_size=1, seed=3)
    layer = Layer(window, 4, 2)
    stay, leave = layer.residents
    out = [e for e in range(4) if e not in layer.residents]
    tokens = [0, 0, 0, 0]
    tokens[stay], tokens[out[0]], tokens[out[1]] = 3, 2, 4
    assert not len(layer.step(0, tokens).admit)
    moves = layer.step(1, tokens)  # scores 6, 0 inside and 4, 8 outside
    assert moves.admit.tolist() == [out[1]] and moves.evict.tolist() == [leave]
    assert not len(layer.step(2, tokens).admit)  # a new window


@pytest.mark.parametrize(("always", "swapped"), [(True, 2), (False, 1)])
def test_dali_swaps_all_as_printed_or_only_where_the_score_rises(
    always: bool, swapped: int
) -> None:
    """Algorithm 2 exchanges `u_size` of each side, whatever their scores are."""
    window = DaliWindow([3], 6, w_size=1, u_size=2, seed=1, always=always)
    layer = Layer(window, 6, 3)
    inside, out = layer.residents, [e for e in range(6) if e not in layer.residents]
    tokens = [0] * 6
    for expert, number in zip([*inside, *out], [5, 4, 0, 3, 1, 0], strict=True):
        tokens[expert] = number
    moves = layer.step(0, tokens)
    assert moves.admit.tolist() == sorted(out[:swapped])
    assert moves.evict.tolist() == sorted([inside[2], inside[1]][:swapped])
    silent = layer.step(1, [0] * 6)
    assert len(silent.admit) == len(silent.evict) == (2 if always else 0)


def test_dali_starts_at_random_from_its_seed() -> None:
    first, again = DaliWindow([8, 8], 64, seed=5), DaliWindow([8, 8], 64, seed=5)
    other = DaliWindow([8, 8], 64, seed=6)
    assert first.initial(0).tolist() == again.initial(0).tolist()
    assert first.initial(0).tolist() != first.initial(1).tolist()
    assert first.initial(0).tolist() != other.initial(0).tolist()


def test_the_score_cache_admits_only_what_was_fetched() -> None:
    layer = Layer(ScoreCache([2], 4), 4, 2)
    assert layer.residents == [0, 1]
    assert not len(layer.step(0, [1, 0, 5, 5]).admit)
    moves = layer.step(1, [1, 0, 5, 5], fetched=[3])
    assert moves.admit.tolist() == [3] and moves.evict.tolist() == [1]


def test_lowtide_moves_what_pays_within_the_interval() -> None:
    # Two tokens of an absent expert take 6 s on the host, 8 s by a fetch and 1 s when resident.
    layer = Layer(Lowtide([1], 3, COSTS, tau=4), 3, 1)
    assert layer.residents == [0]
    assert layer.step(0, [1, 0, 2]).admit.tolist() == [2]
    # The link was idle, so a move costs nothing; at equal worth nobody moves.
    assert not len(Layer(Lowtide([1], 2, COSTS), 2, 1).step(0, [2, 2]).admit)


def test_lowtide_charges_a_move_for_a_busy_link() -> None:
    layer = Layer(Lowtide([2], 4, COSTS, tau=1), 4, 2)
    layer.step(0, [1, 2, 9, 9], fetched=[2, 3])
    assert layer.residents == [2, 3]  # fetched experts come for free
    tokens = [1, 2, 0, 1]
    assert Layer(Lowtide([1], 4, COSTS, tau=1), 4, 1).step(0, tokens).admit.tolist() == [1]
    busy = Layer(Lowtide([1], 4, COSTS, tau=1), 4, 1)
    assert not len(busy.step(0, tokens, fetched=[3]).admit)


def test_a_cap_on_bytes_limits_moves_but_not_fetched_experts() -> None:
    # Fetching is dear and the host slow: every move pays.
    costs = Costs(10, 1.0, Curve([(1, 50.0)]), Curve([(1, 0.1)]), Curve([(1, 99.0)]), 0.0)
    layer = Layer(Lowtide([4], 12, costs, max_step_bytes=20), 12, 4, costs)
    tokens = [0] * 4 + [1] * 8
    assert layer.step(0, tokens).admit.tolist() == [4, 5]
    layer = Layer(Lowtide([4], 12, costs, max_step_bytes=20), 12, 4, costs)
    assert layer.step(0, tokens, fetched=[10, 11]).admit.tolist() == [4, 5, 10, 11]


def test_a_small_cap_saves_up() -> None:
    costs = Costs(10, 1.0, Curve([(1, 50.0)]), Curve([(1, 0.1)]), Curve([(1, 99.0)]), 0.0)
    layer = Layer(Lowtide([4], 8, costs, max_step_bytes=5), 8, 4, costs)
    admitted = [len(layer.step(index, [0] * 4 + [1] * 4).admit) for index in range(4)]
    assert admitted == [0, 1, 0, 1]


def test_lowtide_follows_an_online_tau() -> None:
    online = OnlineTau(4, 2, COSTS, tau=3)
    assert Lowtide([2], 4, COSTS, tau=online).tau == 3


def test_layer_budgets_follow_marginal_benefit() -> None:
    worth = np.array([[9.0, 8.0, 1.0], [7.0, 1.0, 1.0]])
    assert layer_budgets(worth, 3).tolist() == [2, 1]
    assert layer_budgets(worth, 2).tolist() == [2, 0]
    assert layer_budgets(np.ones((3, 4)), 7).tolist() == [3, 2, 2]  # equals go round


@given(
    rows=st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=2, max_size=3),
    total=st.integers(0, 6),
)
def test_layer_budgets_are_optimal(rows: list[list[int]], total: int) -> None:
    worth = np.array(rows, np.float64)
    best = -np.sort(-worth, axis=1)

    def value(budgets: tuple[int, ...]) -> float:
        return sum(float(best[layer, :count].sum()) for layer, count in enumerate(budgets))

    mine = tuple(layer_budgets(worth, total).tolist())
    everyone = [b for b in product(range(4), repeat=len(rows)) if sum(b) == total]
    assert sum(mine) == total and value(mine) == max(value(b) for b in everyone)


def test_what_one_layer_fetches_is_no_other_layers() -> None:
    placement, nobody = ScoreCache([1, 1], 4), np.zeros(4, np.bool_)
    demand = Demand(np.array([2]), np.array([9]), np.array([False]))
    facts = make_facts(demand, is_kept=nobody, capacity=[1, 1], fetched=np.array([2]))
    assert placement.update(facts).admit.tolist() == [2]
    assert not len(placement.update(facts._replace(layer=1, fetched=NO_EXPERTS)).admit)


def test_lowtide_keeps_how_it_has_divided_its_slots() -> None:
    held = Budgets([4, 4], 8)
    for _ in range(2):
        held.begin_step(lambda: np.array([[9.0] * 8, [0.0] * 8]))
    held.settle(np.array([4, 4]))
    assert held.capacity.tolist() == [4, 3]
    held.settle(np.array([4, 3]))
    assert held.capacity.tolist() == [5, 3]
    held.resize(np.array([2, 4]))
    assert held.capacity.tolist() == [3, 3]
    held.resize(np.array([0, 2]))
    assert held.capacity.sum() == 2
    held.resize(np.array([4, 4]))  # what is won has to come free first
    held.settle(np.array([5, 3]))
    assert held.capacity.sum() == 2
    held.settle(np.array([0, 0]))
    assert held.capacity.sum() == 8
