"""Assignment: worked examples, the optimum by enumeration, and what every policy promises."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.core import Assignment, BoolArray, Costs, Curve, Demand
from lowtide.errors import PlanError, UsageError
from lowtide.policies.assignment import (
    AllFetch,
    AllHost,
    Assign,
    Balance,
    Beam,
    Exact,
    Fiddler,
    Greedy,
    GreedyDevices,
    HybriMoEGreedy,
    HybriMoEThreshold,
    LayerSplit,
    Prices,
    break_even_tokens,
    exact_mask,
    greedy_mask,
    is_on_device,
    makespan,
    prices,
)
from lowtide.policies.split import FixedShare


def make_costs(
    link_s: float = 7.0, host_s: float = 2.0, device_s: float = 1.0, num_staging: int = 2
) -> Costs:
    """Per expert: a fetch of `link_s`, then seconds per token on either side."""
    return Costs(
        expert_bytes=64,
        link_s=link_s,
        host_s=Curve([(1, host_s), (2, 2 * host_s)]),
        device_s=Curve([(1, device_s), (2, 2 * device_s)]),
        dense_s=Curve([(1, 1.0)]),
        sync_s=0.5,
        num_staging=num_staging,
    )


def make_demand(tokens: list[int], resident: list[int] | None = None) -> Demand:
    """Expert e has `tokens[e]` tokens."""
    hits = np.array(tokens, np.int64)
    experts = np.flatnonzero(hits)
    return Demand(experts, hits[experts], np.isin(experts, resident or []))


def ids(assignment: Assignment) -> tuple[list[int], list[int], list[int]]:
    return assignment.resident.tolist(), assignment.fetch.tolist(), assignment.host.tolist()


def all_policies(costs: Costs) -> list[Assign]:
    policies: list[Assign] = [Greedy(costs), Beam(costs, 3), Exact(costs), Balance(costs)]
    policies += [AllHost(), Fiddler(costs), Fiddler(costs, by_threshold=True)]
    policies += [HybriMoEThreshold(costs), HybriMoEGreedy(costs), LayerSplit([False])]
    return [*policies, AllFetch(costs), FixedShare(0.5)]


def best_makespan(price: Prices) -> float:
    masks = product([False, True], repeat=len(price.host_s))
    return min(makespan(price, np.array(mask, np.bool_)) for mask in masks)


demands = st.lists(st.integers(0, 40), min_size=1, max_size=9).flatmap(
    lambda tokens: st.builds(
        make_demand, st.just(tokens), st.lists(st.integers(0, len(tokens) - 1), unique=True)
    )
)
some_costs = st.builds(
    make_costs,
    link_s=st.floats(0.1, 100),
    host_s=st.floats(0.1, 10),
    device_s=st.floats(0.01, 5),
)


def test_a_curve_is_linear_between_its_points_and_beyond() -> None:
    curve = Curve([(1, 2.0), (4, 8.0), (8, 10.0)])
    assert curve(np.array([0, 1, 2, 4, 6, 8, 12])).tolist() == [0, 2, 4, 8, 9, 10, 12]
    assert Curve([(3, 5.0)])(np.array([1, 3, 1000])).tolist() == [5, 5, 5]
    for points in ([], [(2, 1.0), (2, 2.0)], [(0, 1.0)], [(1, -1.0)]):
        with pytest.raises(ValueError):
            Curve(points)


def test_prices_are_those_of_the_paper() -> None:
    demand = make_demand([1, 20, 5, 0], resident=[2])
    price = prices(make_costs(), demand)
    assert price.device_s.tolist() == [7, 20, 5]  # a transfer, a computation, a resident
    assert price.host_s.tolist() == [2, 40, 10]
    under_way = prices(make_costs(), demand, np.array([3.0, np.inf, np.inf]))
    assert under_way.device_s.tolist() == [3, 20, 5]


def test_greedy_follows_algorithm_1() -> None:
    # |t_gpu - t_cpu| = 20, 5, 5 for experts 1, 0, 2: expert 1 to the device (20 <= 40), then
    # expert 0 to the host (27 > 2), expert 2 to the host (25 > 12).
    greedy = Greedy(make_costs())
    assert ids(greedy(0, make_demand([1, 20, 5], resident=[2]))) == ([], [1], [0, 2])


def test_ties_go_to_the_device() -> None:
    demand = make_demand([1])
    assert ids(Greedy(make_costs(link_s=2.0))(0, demand)) == ([], [0], [])


def test_a_prefetched_expert_costs_what_remains() -> None:
    costs, demand = make_costs(link_s=70.0), make_demand([3, 3])
    assert ids(Greedy(costs)(0, demand)) == ([], [], [0, 1])
    assert ids(Greedy(costs)(0, demand, np.array([np.inf, 1.0]))) == ([], [1], [0])
    assert ids(AllHost()(0, demand, np.array([0.0, 1.0]))) == ([], [0], [1])


def test_without_staging_nothing_is_fetched() -> None:
    costs = make_costs(link_s=0.0, num_staging=0)
    demand = make_demand([9, 9, 9], resident=[0])
    for policy in (Greedy(costs), Beam(costs), Exact(costs), Balance(costs), HybriMoEGreedy(costs)):
        assert not len(policy(0, demand).fetch)
    with pytest.raises(PlanError, match="staging"):
        AllFetch(costs)


def test_the_simple_ones() -> None:
    demand, costs = make_demand([1, 2, 9, 9], resident=[0, 3]), make_costs()
    assert ids(AllHost()(0, demand)) == ([0, 3], [], [1, 2])
    assert ids(AllFetch(costs)(0, demand)) == ([0, 3], [1, 2], [])
    assert ids(Fiddler(costs)(0, demand)) == ([0, 3], [], [1, 2])
    # Transfer and computation in turn: 7 + 9 < 18, but 7 + 2 > 4.
    assert ids(Fiddler(costs, by_threshold=True)(0, demand)) == ([0, 3], [2], [1])
    assert break_even_tokens(costs) == 4  # max(7, 4) <= 8
    assert ids(HybriMoEThreshold(costs)(0, demand)) == ([0, 3], [2], [1])
    split = LayerSplit([False, True])
    assert ids(split(0, demand)) == ([], [], [0, 1, 2, 3])
    assert ids(split(1, demand)) == ([0, 3], [1, 2], [])


def test_balance_lets_the_link_work_beside_the_device() -> None:
    # Residents keep the device busy for 20 s. Expert 2 (40 s on the host) arrives meanwhile.
    demand = make_demand([10, 10, 20, 1], resident=[0, 1])
    assert ids(Balance(make_costs(host_s=2.0))(0, demand)) == ([1], [2], [0, 3])


def test_balance_relieves_a_busy_device() -> None:
    costs = make_costs(device_s=1.0, host_s=1.5)  # 4 s against 6 s: three here, two there
    assert len(Balance(costs)(0, make_demand([4] * 5, resident=[0, 1, 2, 3, 4])).host) == 2


def test_balance_fetches_those_that_the_host_is_slowest_at() -> None:
    # A transfer takes 7 s whatever it brings: 10 tokens are 20 s on the host, 1 is 2 s.
    demand = make_demand([1, 10, 1, 1])
    assert ids(Balance(make_costs())(0, demand)) == ([], [1], [0, 2, 3])
    # With the order of ids, or the longest to the host first, expert 1 would wait.


def test_balance_waits_for_what_the_link_has_begun() -> None:
    demand, balance = make_demand([4, 4]), Balance(make_costs())
    assert ids(balance(0, demand)) == ([], [0], [1])  # 7 + 4 against 8 + 8
    assert ids(balance(0, demand, link_s=6.0)) == ([], [], [0, 1])
    # What is on its way is not behind the link's other work.
    coming = np.array([np.inf, 2.0])
    assert ids(balance(0, demand, coming, link_s=6.0)) == ([], [1], [0])


def test_hybrimoes_code_meets_in_the_middle() -> None:
    # Queue: residents 0 (6 tokens), 1 (2), absent 3 (9), 2 (1). The device takes 0 (6 s) when the
    # host has taken 2 (2 s), for 6 <= 2 + 18; then 1 (8 s), and 3 at max(8, 7) + 9 <= 2 + 18.
    demand = make_demand([6, 2, 1, 9], resident=[0, 1])
    assert ids(HybriMoEGreedy(make_costs())(0, demand)) == ([0, 1], [3], [2])
    # A slow link: the host takes expert 3 after all, and then a resident.
    work = HybriMoEGreedy(make_costs(link_s=100.0, device_s=4.0))(0, demand)
    assert ids(work) == ([0], [], [1, 2, 3])


@given(demand=demands, costs=some_costs)
def test_every_activated_expert_is_placed_once(demand: Demand, costs: Costs) -> None:
    for policy in all_policies(costs):
        work = policy(0, demand)
        placed = np.concatenate(work)
        assert np.array_equal(np.sort(placed), demand.experts)
        residents = set(demand.experts[demand.is_resident].tolist())
        assert not residents & set(work.fetch.tolist())
        assert residents >= set(work.resident.tolist())
        assert all((np.diff(part) > 0).all() for part in work)


@given(demand=demands, costs=some_costs)
def test_exact_is_the_optimum_and_greedy_is_within_twice(demand: Demand, costs: Costs) -> None:
    price = prices(costs, demand)
    best = best_makespan(price)
    slack = 1e-9 * len(price.host_s)
    exact = makespan(price, is_on_device(demand, Exact(costs)(0, demand)))
    assert abs(exact - best) <= slack
    assert makespan(price, greedy_mask(price)) <= 2 * best + slack
    for policy in all_policies(costs):
        assert makespan(price, is_on_device(demand, policy(0, demand))) >= best - slack


@pytest.mark.parametrize("seed", range(4))
def test_exact_solves_a_whole_layer(seed: int) -> None:
    draw = np.random.default_rng(seed)
    tokens = 1 + draw.geometric(0.5, 120)
    is_resident = draw.random(120) < 0.4
    costs = make_costs(link_s=9.0, host_s=1.7, device_s=0.31)
    price = prices(costs, Demand(np.arange(120), tokens, is_resident))
    exact = makespan(price, exact_mask(price))
    assert exact <= makespan(price, greedy_mask(price))
    # No fractional split is shorter: the Lagrangian bound at any weight.
    for weight in np.linspace(0, 1, 11):
        bound = np.minimum(weight * price.device_s, (1 - weight) * price.host_s).sum()
        assert bound <= exact + 1e-6


def test_exact_names_its_limit() -> None:
    price = Prices(np.linspace(1, 2, 30) ** 3, np.linspace(2, 1, 30) ** 2)
    with pytest.raises(UsageError, match="more than 2 partial splits"):
        exact_mask(price, max_states=2)


def test_beam_refuses_no_width() -> None:
    with pytest.raises(UsageError, match="width"):
        Beam(make_costs(), 0)


@given(demand=demands, costs=some_costs)
def test_one_device_of_several_is_greedy(demand: Demand, costs: Costs) -> None:
    many = GreedyDevices([costs])
    [alone] = many(demand.experts, demand.num_tokens, demand.is_resident[None])
    assert ids(alone) == ids(Greedy(costs)(0, demand))


@given(demand=demands, costs=some_costs, data=st.data())
def test_several_devices_share_the_work(demand: Demand, costs: Costs, data: st.DataObject) -> None:
    num_devices = data.draw(st.integers(2, 3))
    shape = (num_devices, len(demand.experts))
    draw = np.random.default_rng(data.draw(st.integers(0, 99)))
    is_resident: BoolArray = draw.random(shape) < 0.3
    work = GreedyDevices([costs] * num_devices)(demand.experts, demand.num_tokens, is_resident)
    placed = np.concatenate([part for one in work for part in one])
    assert np.array_equal(np.sort(placed), demand.experts)
    hits = dict(zip(demand.experts.tolist(), demand.num_tokens.tolist(), strict=True))
    for device, one in enumerate(work):
        assert set(one.resident.tolist()) <= set(demand.experts[is_resident[device]].tolist())
    # The list-scheduling bound: no later than everything done one after the other where fastest.
    on_device = [prices(costs, Demand(*demand[:2], here)).device_s for here in is_resident]
    host_s = costs.host_s(demand.num_tokens)
    least = np.minimum(np.min(on_device, axis=0), host_s).sum()
    host_end_s = sum(float(costs.host_s(np.array([hits[e]]))[0]) for e in work[0].host.tolist())
    assert host_end_s <= least + 1e-9


def test_no_device_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one device"):
        GreedyDevices([])
