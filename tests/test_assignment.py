"""Assignment: worked examples, the optimum by enumeration, and what every policy promises."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_facts import make_facts

from lowtide.core import Assignment, Costs, Curve, Demand
from lowtide.errors import PlanError, UsageError
from lowtide.lab.baselines import (
    Fiddler,
    FixedShare,
    HybriMoEGreedy,
    HybriMoEThreshold,
    LayerSplit,
    break_even_tokens,
)
from lowtide.lab.best_assignments import exact_mask
from lowtide.policies.assignment import (
    AllFetch,
    AllHost,
    Assign,
    Balance,
    Greedy,
    HostAlone,
    Prices,
    greedy_mask,
    makespan,
    prices,
)
from lowtide.policies.catalogue import CATALOGUE
from lowtide.policies.presets import fetches_all
from lowtide.policies.recipe import PolicyInputs


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
    policies: list[Assign] = [Greedy(), Balance()]
    policies += [AllHost(), Fiddler(), Fiddler(by_threshold=True)]
    policies += [HybriMoEThreshold(costs), HybriMoEGreedy(), LayerSplit()]
    return [*policies, AllFetch(), FixedShare(0.5)]


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
    price = prices(make_facts(demand, make_costs()))
    assert price.device_s.tolist() == [7, 20, 5]  # a transfer, a computation, a resident
    assert price.host_s.tolist() == [2, 40, 10]
    under_way = prices(make_facts(demand, make_costs(), arriving_s=np.array([3.0, np.inf, np.inf])))
    assert under_way.device_s.tolist() == [3, 20, 5]


def test_greedy_follows_algorithm_1() -> None:
    # |t_gpu - t_cpu| = 20, 5, 5 for experts 1, 0, 2: expert 1 to the device (20 <= 40), then
    # expert 0 to the host (27 > 2), expert 2 to the host (25 > 12).
    facts = make_facts(make_demand([1, 20, 5], resident=[2]), make_costs())
    assert ids(Greedy()(facts)) == ([], [1], [0, 2])


def test_ties_go_to_the_device() -> None:
    demand = make_demand([1])
    assert ids(Greedy()(make_facts(demand, make_costs(link_s=2.0)))) == ([], [0], [])


def test_a_prefetched_expert_costs_what_remains() -> None:
    costs, demand = make_costs(link_s=70.0), make_demand([3, 3])
    facts = make_facts(demand, costs)
    assert ids(Greedy()(facts)) == ([], [], [0, 1])
    assert ids(Greedy()(facts._replace(arriving_s=np.array([np.inf, 1.0])))) == ([], [1], [0])
    assert ids(AllHost()(facts._replace(arriving_s=np.array([0.0, 1.0])))) == ([], [0], [1])


def test_without_staging_nothing_is_fetched() -> None:
    costs = make_costs(link_s=0.0, num_staging=0)
    facts = make_facts(make_demand([9, 9, 9], resident=[0]), costs)
    assert not facts.can_fetch
    policies: list[Assign] = [Greedy(), Balance(), HybriMoEGreedy(), AllHost()]
    policies += [Fiddler(by_threshold=True), HybriMoEThreshold(costs, 1), LayerSplit()]
    for policy in policies:
        assert not len(policy(facts).fetch)
        assert not len(policy(facts._replace(capacity=np.array([3]))).fetch)


def test_presets_that_need_a_staging_slot_are_those_that_fetch_everything() -> None:
    setting = PolicyInputs([0], 4, make_costs(num_staging=0), options={"miss": "wait"})
    for name in CATALOGUE:
        if fetches_all(name):
            with pytest.raises(PlanError, match="staging.*`gpu_memory`"):
                CATALOGUE[name].policies(setting)
        else:
            CATALOGUE[name].policies(setting)


def test_the_simple_ones() -> None:
    costs = make_costs()
    facts = make_facts(make_demand([1, 2, 9, 9], resident=[0, 3]), costs)
    assert ids(AllHost()(facts)) == ([0, 3], [], [1, 2])
    assert ids(HostAlone()(facts)) == ([], [], [0, 1, 2, 3])
    assert ids(AllFetch()(facts)) == ([0, 3], [1, 2], [])
    assert ids(Fiddler()(facts)) == ([0, 3], [], [1, 2])
    # Transfer and computation in turn: 7 + 9 < 18, but 7 + 2 > 4.
    assert ids(Fiddler(by_threshold=True)(facts)) == ([0, 3], [2], [1])
    assert break_even_tokens(costs) == 4  # max(7, 4) <= 8
    assert ids(HybriMoEThreshold(costs)(facts)) == ([0, 3], [2], [1])
    both = facts._replace(capacity=np.array([0, 4]))
    assert ids(LayerSplit()(both)) == ([], [], [0, 1, 2, 3])
    assert ids(LayerSplit()(both._replace(layer=1))) == ([0, 3], [1, 2], [])


def test_balance_lets_the_link_work_beside_the_device() -> None:
    # Residents keep the device busy for 20 s. Expert 2 (40 s on the host) arrives meanwhile.
    demand = make_demand([10, 10, 20, 1], resident=[0, 1])
    assert ids(Balance()(make_facts(demand, make_costs(host_s=2.0)))) == ([1], [2], [0, 3])


def test_balance_relieves_a_busy_device() -> None:
    costs = make_costs(device_s=1.0, host_s=1.5)  # 4 s against 6 s: three here, two there
    facts = make_facts(make_demand([4] * 5, resident=[0, 1, 2, 3, 4]), costs)
    assert len(Balance()(facts).host) == 2


def test_balance_fetches_those_that_the_host_is_slowest_at() -> None:
    # A transfer takes 7 s whatever it brings: 10 tokens are 20 s on the host, 1 is 2 s.
    demand = make_demand([1, 10, 1, 1])
    assert ids(Balance()(make_facts(demand, make_costs()))) == ([], [1], [0, 2, 3])
    # With the order of ids, or the longest to the host first, expert 1 would wait.


def test_balance_waits_for_what_the_link_has_begun() -> None:
    facts, balance = make_facts(make_demand([4, 4]), make_costs()), Balance()
    assert ids(balance(facts)) == ([], [0], [1])  # 7 + 4 against 8 + 8
    facts = facts._replace(link_s=6.0)
    assert ids(balance(facts)) == ([], [], [0, 1])
    # What is on its way is not behind the link's other work.
    coming = np.array([np.inf, 2.0])
    assert ids(balance(facts._replace(arriving_s=coming))) == ([], [1], [0])


def test_hybrimoes_code_meets_in_the_middle() -> None:
    # Queue: residents 0 (6 tokens), 1 (2), absent 3 (9), 2 (1). The device takes 0 (6 s) when the
    # host has taken 2 (2 s), for 6 <= 2 + 18; then 1 (8 s), and 3 at max(8, 7) + 9 <= 2 + 18.
    demand = make_demand([6, 2, 1, 9], resident=[0, 1])
    assert ids(HybriMoEGreedy()(make_facts(demand, make_costs()))) == ([0, 1], [3], [2])
    # A slow link: the host takes expert 3 after all, and then a resident.
    slow = make_facts(demand, make_costs(link_s=100.0, device_s=4.0))
    assert ids(HybriMoEGreedy()(slow)) == ([0], [], [1, 2, 3])


def on_device(demand: Demand, assignment: Assignment) -> np.ndarray:
    """Per activated expert: whether `assignment` leaves it to the device."""
    return np.isin(demand.experts, assignment.host, invert=True)


@given(demand=demands, costs=some_costs)
def test_every_activated_expert_is_placed_once(demand: Demand, costs: Costs) -> None:
    for policy in all_policies(costs):
        work = policy(make_facts(demand, costs))
        placed = np.concatenate(work[:3])
        assert np.array_equal(np.sort(placed), demand.experts)
        residents = set(demand.experts[demand.is_resident].tolist())
        assert not residents & set(work.fetch.tolist())
        assert residents >= set(work.resident.tolist())
        assert all((np.diff(part) > 0).all() for part in work[:3])


@given(demand=demands, costs=some_costs)
def test_exact_is_the_optimum_and_greedy_is_within_twice(demand: Demand, costs: Costs) -> None:
    facts = make_facts(demand, costs)
    price = prices(facts)
    best = best_makespan(price)
    slack = 1e-9 * len(price.host_s)
    exact = makespan(price, exact_mask(price))
    assert abs(exact - best) <= slack
    assert makespan(price, greedy_mask(price)) <= 2 * best + slack
    for policy in all_policies(costs):
        assert makespan(price, on_device(demand, policy(facts))) >= best - slack


@pytest.mark.parametrize("seed", range(4))
def test_exact_solves_a_whole_layer(seed: int) -> None:
    draw = np.random.default_rng(seed)
    tokens = 1 + draw.geometric(0.5, 120)
    is_resident = draw.random(120) < 0.4
    costs = make_costs(link_s=9.0, host_s=1.7, device_s=0.31)
    price = prices(make_facts(Demand(np.arange(120), tokens, is_resident), costs))
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
