"""TIDE by its text: Equations 4 to 7, Algorithm 1 and its released code, in random cases.

The oracles are written from the paper, with sets and loops, and share nothing with the policies.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from examples import scaled
from policy_facts import make_facts

from lowtide.core import Costs, Curve, Demand, IntArray, PassRows, RowKind, Step, StepKind
from lowtide.policies.placement import Placement
from lowtide.policies.presets import recipe
from lowtide.policies.recipe import PolicyInputs
from lowtide.policies.tau import calibrated_tau, drift, expected_migrations, miss_shares

NUM_CASES = 200
COSTS = Costs(10, 4.0, Curve([(1, 3.0)]), Curve([(1, 1.0)]), Curve([(1, 1.0)]), 0.0)


def draws() -> Iterator[np.random.Generator]:
    for seed in range(scaled(NUM_CASES)):
        yield np.random.default_rng(seed)


def best(hits: IntArray, residents: set[int], budget: int) -> set[int]:
    """Return the `budget` experts with most hits, of those that are resident or asked for."""
    union = residents | {e for e, count in enumerate(hits.tolist()) if count}
    ranked = sorted(union, key=lambda e: (-int(hits[e]), e not in residents, e))
    return set(ranked[:budget])


def algorithm_1(hits: IntArray, budget: int, tau: int, residents: set[int]) -> list[set[int]]:
    """Return a layer's residents after each step of a block [steps, experts]."""
    after = []
    for t, now in enumerate(hits):
        if t % tau == 0:
            residents = best(now, residents, budget)
        after.append(residents)
    return after


def residents_after(
    placement: Placement, steps: list[Step], hits: IntArray, budget: int
) -> list[set[int]]:
    """Return what a placement keeps of one layer after each of its passes [passes, experts]."""
    here, after = np.zeros(hits.shape[1], np.bool_), []
    here[placement.initial(0)] = True
    for step, now in zip(steps, hits, strict=True):
        experts = now.nonzero()[0]
        demand = Demand(experts, now[experts], here[experts])
        moves = placement.update(
            make_facts(demand, COSTS, step=step, is_kept=here.copy(), capacity=[budget])
        )
        here[moves.evict], here[moves.admit] = False, True
        after.append(set(here.nonzero()[0].tolist()))
    return after


def place(name: str, budget: int, num_experts: int, tau: int) -> Placement:
    inputs = PolicyInputs([budget], num_experts, COSTS, options={"tau": tau})
    return recipe(name).policies(inputs).placement


def test_algorithm_1() -> None:
    """Blocks one after the other; each begins with the residents of the last."""
    for draw in draws():
        num_experts, tau = int(draw.integers(2, 12)), int(draw.integers(1, 6))
        budget = int(draw.integers(1, num_experts + 1))
        lengths = draw.integers(1, 9, 3).tolist()
        hits = draw.integers(0, 4, (sum(lengths), num_experts)) * draw.integers(0, 2, num_experts)
        wanted: list[set[int]] = []
        for start, length in zip(np.cumsum([0, *lengths]).tolist(), lengths, strict=False):
            last = wanted[-1] if wanted else set()
            wanted += algorithm_1(hits[start : start + length], budget, tau, last)
        steps = [Step(StepKind.DENOISE, t) for length in lengths for t in range(length)]
        found = residents_after(place("tide", budget, num_experts, tau), steps, hits, budget)
        assert found == wanted, (hits, budget, tau)


def test_the_released_code() -> None:
    """Answers one after the other, each a prompt and some blocks.

    Experts 0 to B - 1 are resident at first. Every step of an answer's first block refreshes, the
    other blocks' steps at the interval.
    """
    made = recipe("tide-released")
    assert made.waits(PolicyInputs([1], 2, COSTS)), "a refresh waits for what it admits"
    for draw in draws():
        num_experts, tau = int(draw.integers(2, 12)), int(draw.integers(1, 6))
        budget = int(draw.integers(1, num_experts + 1))
        steps: list[Step] = []
        is_refresh: list[bool] = []
        for answer in range(2):
            rows = PassRows(np.array([answer]), np.array([RowKind.DRAFT], np.uint8))
            if draw.random() < 0.5:
                steps.append(Step(StepKind.PREFILL, 0, rows))
                is_refresh.append(True)
            for block, length in enumerate(draw.integers(1, 7, 3).tolist()):
                steps += [Step(StepKind.DENOISE, t, rows) for t in range(length)]
                is_refresh += [block == 0 or t % tau == 0 for t in range(length)]
        hits = draw.integers(0, 4, (len(steps), num_experts))
        residents, wanted = set(range(budget)), []
        for now, refreshes in zip(hits, is_refresh, strict=True):
            residents = best(now, residents, budget) if refreshes else residents
            wanted.append(residents)
        placement = place("tide-released", budget, num_experts, tau)
        assert residents_after(placement, steps, hits, budget) == wanted, (hits, budget, tau)


def test_several_answers_at_once_have_no_first_block() -> None:
    placement = place("tide-released", 1, 4, 4)
    rows = PassRows(np.array([3, 5]), np.full(2, RowKind.DRAFT, np.uint8))
    steps = [Step(StepKind.DENOISE, t, rows) for t in range(1, 5)]
    hits = np.array([[0, 0, 0, 2], [0, 0, 3, 0], [0, 4, 0, 0], [0, 0, 5, 0]])
    assert residents_after(placement, steps, hits, 1) == [{0}, {0}, {0}, {2}]


def test_the_interval_of_the_equations() -> None:
    """Eq. 4's drift, Eq. 5's migrations, Eq. 6's misses, and the tau of least Eq. 7."""
    for draw in draws():
        num_experts, num_steps = int(draw.integers(2, 10)), int(draw.integers(2, 9))
        budget = int(draw.integers(1, num_experts + 1))
        hits = draw.integers(0, 4, (num_steps, 1, num_experts))
        link_s, host_s = draw.random(2).tolist()
        every = algorithm_1(hits[:, 0], budget, 1, set())
        changed = [len(now - last) for last, now in zip(every, every[1:], strict=False)]
        d = sum(changed) / (budget * len(changed))
        assert drift([hits], budget) == pytest.approx(d)
        costs = []
        for tau in range(1, num_steps):
            after = algorithm_1(hits[:, 0], budget, tau, set())
            asked = [set(now.nonzero()[0].tolist()) for now in hits[:, 0]]
            missed = sum(len(one - here) for one, here in zip(asked, after, strict=True))
            f = missed / (budget * num_steps)
            assert miss_shares([hits], budget, num_steps)[tau - 1] == pytest.approx(f)
            moved = budget * num_steps / tau * (1 - (1 - d) ** tau)
            assert expected_migrations(d, num_steps, budget, tau) == pytest.approx(moved)
            costs.append(link_s * moved + host_s * num_steps * budget * f)
        found = calibrated_tau([hits], budget, link_s, host_s)
        assert costs[found - 1] == pytest.approx(min(costs))
