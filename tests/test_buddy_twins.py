"""Substitution's twins: the compiled one decides and counts as the plain one, to the last bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from buddy_cases import (
    PLAIN,
    UNBOUNDED,
    account,
    edge_searches,
    random_lists,
    random_routing,
    random_search,
    routed_facts,
    slow_late,
    slow_search,
)
from examples import scaled

from lowtide.buddies import BuddyTwins, LayerRules, Masses, Waits
from lowtide.core import (
    Costs,
    Curve,
    Demand,
    Facts,
    IntArray,
    PassRows,
    RoutedTokens,
    Step,
    StepKind,
)
from lowtide.errors import InternalError
from lowtide.kernels.cpu.buddies import CompiledBuddies
from lowtide.kernels.cpu.library import load_part
from lowtide.kernels.cpu.sources import DECISIONS
from lowtide.policies.buddy_profile import token_entropy

NUM_RANDOM = 10_000  # tokens


@pytest.fixture(scope="module")
def compiled() -> CompiledBuddies:
    return CompiledBuddies(load_part(DECISIONS))


def check_algorithm_1(compiled: CompiledBuddies, rules: LayerRules, facts: Facts) -> int:
    """Both twins by the text of the paper; how many tokens have an expert replaced."""
    assert facts.routing is not None
    wanted = slow_search(rules, facts)
    for twins in (PLAIN, compiled):
        own = twins.of_pass(np.zeros(len(wanted), np.int64), Masses([0.0], [0.0]), 1, None)
        check_runs(twins.of_layer(rules)(facts, own), wanted, rules, facts)
    return int((wanted != facts.routing.experts).any(axis=1).sum())


def check_runs(
    answer: RoutedTokens | None, wanted: IntArray, rules: LayerRules, facts: Facts
) -> None:
    """Assert that the ids of `wanted` [tokens, k] run, each with the weight of its place.

    The answer has them in ascending order; it is None where they are the router's own choice.
    """
    assert facts.routing is not None
    assert (answer is None) == np.array_equal(wanted, facts.routing.experts), (rules, facts)
    answer, order = answer or facts.routing, np.argsort(wanted, axis=1, kind="stable")
    assert np.array_equal(answer.experts, np.take_along_axis(wanted, order, 1)), (rules, facts)
    weights = np.take_along_axis(facts.routing.weights, order, 1)
    assert np.array_equal(answer.weights, weights), (rules, facts)


def test_algorithm_1_in_random_cases(compiled: CompiledBuddies) -> None:
    draw, num_found = np.random.default_rng(0), 0
    for _ in range(scaled(NUM_RANDOM) // 50):
        num_found += check_algorithm_1(compiled, *random_search(draw))
    assert num_found > scaled(NUM_RANDOM) // 10


def test_algorithm_1_at_the_edge(compiled: CompiledBuddies) -> None:
    assert sum(check_algorithm_1(compiled, *case) for case in edge_searches()) > 20


class Case:
    """A layer of any size, with gates, bounds and experts on their way, or without."""

    def __init__(self, draw: np.random.Generator, most_tokens: int) -> None:
        def perhaps(chance: float) -> bool:
            return bool(draw.random() < chance)

        num_experts, num_tokens = int(draw.integers(3, 30)), int(draw.integers(1, most_tokens + 1))
        k, length = int(draw.integers(1, min(8, num_experts) + 1)), int(draw.integers(1, 9))
        routing = random_routing(draw, num_tokens, num_experts, k, int(draw.integers(0, 5)))
        # Now and then exactly the entropy of one of the tokens, which is forbidden.
        entropy = float(draw.choice(token_entropy(routing.weights))) if perhaps(0.5) else 0.9
        self.rules = LayerRules(
            int(draw.integers(0, 2)),
            random_lists(draw, num_experts, num_experts, length),
            int(draw.choice([0, 1, 2, 3, UNBOUNDED])),
            int(draw.integers(0, 4)),
            entropy if perhaps(0.3) else -1.0,
            float(draw.random()) if perhaps(0.3) else np.inf,
            float(draw.choice([0.25, 0.5, 0.9])) if perhaps(0.3) else np.inf,
        )
        facts = routed_facts(routing, draw.random(num_experts) < 0.3 + 0.7 * draw.random())
        asked = facts.demand.experts
        due_s = np.where(draw.random(len(asked)) < 0.7, np.inf, 0.5) if perhaps(0.5) else None
        kinds = draw.integers(0 if perhaps(0.5) else 3, 4, num_tokens).astype(np.uint8)
        self.owner = draw.integers(0, 3, num_tokens)
        step = Step(StepKind.DECODE, 0, PassRows(self.owner, kinds))
        self.facts = facts._replace(step=step, layer=self.rules.layer, arriving_s=due_s)
        self.share = None if perhaps(0.4) else float(draw.choice([0.0, 0.05, 0.3, 1.0]))
        self.waits = random_waits(draw, num_experts)

    def decided(self, twins: BuddyTwins, waits: Waits | None) -> tuple[RoutedTokens | None, object]:
        """Return the routing that runs, and the account of it."""
        before = Masses([0.0, 2.0, 3.0], [0.0, 0.05, 3.5])
        own = twins.of_pass(self.owner, before, 2, self.share)
        answer = twins.of_layer(self.rules)(self.facts, own, waits)
        return answer, (own.masses, own.moved)


def random_waits(draw: np.random.Generator, num_experts: int) -> Waits:
    queue_of = draw.integers(0, 4, num_experts).astype(np.uint8) if draw.random() < 0.5 else None
    starts_s, each_s = (tuple(draw.integers(0, 3, 2) * one) for one in (0.5, 0.25))
    host_s = draw.integers(0, 4, num_experts) * 0.25
    return Waits(queue_of, starts_s, each_s, host_s, float(draw.integers(0, 4)) * 0.25)  # type: ignore[arg-type]


def random_cases(num_cases: int, most_tokens: int) -> Iterator[Case]:
    draw = np.random.default_rng(1)
    for _ in range(scaled(num_cases)):
        yield Case(draw, most_tokens)


def check_equal(compiled: CompiledBuddies, case: Case, waits: Waits | None) -> bool:
    """Assert that both twins decide the same; return True if they have an answer at all."""
    (answer, counts), (other, other_counts) = (
        case.decided(twins, waits) for twins in (PLAIN, compiled)
    )
    assert counts == other_counts, vars(case)
    assert (answer is None) == (other is None), vars(case)
    if answer is None or other is None:
        return False
    for mine, theirs in zip(answer[:2], other[:2], strict=True):
        assert np.array_equal(mine, theirs) and mine.dtype == theirs.dtype, vars(case)
    return True


def test_absent_experts_are_replaced_and_counted_alike(compiled: CompiledBuddies) -> None:
    cases = random_cases(NUM_RANDOM // 25, 50)
    num_found = sum(check_equal(compiled, case, None) for case in cases)
    assert num_found > scaled(NUM_RANDOM) // 125


def test_late_experts_are_given_up_and_counted_alike(compiled: CompiledBuddies) -> None:
    cases = random_cases(NUM_RANDOM // 8, 6)
    num_found = sum(check_equal(compiled, case, case.waits) for case in cases)
    assert num_found > scaled(NUM_RANDOM) // 80


def test_late_experts_in_every_small_case(compiled: CompiledBuddies) -> None:
    """Compare both twins with the description of `late` in every case of a small layer.

    Two tokens of two of four experts, every set of residents, every number of late experts.
    """
    lists = np.array([[1, 2, 3], [0, 3, -1], [3, -1, -1], [2, 1, 0]], np.int32)
    weights = np.array([[0.3, 0.7], [0.5, 0.5]], np.float32)
    pairs, num_found = list(itertools.combinations(range(4), 2)), 0
    for experts, here in itertools.product(
        itertools.product(pairs, repeat=2), itertools.product([False, True], repeat=4)
    ):
        facts = routed_facts(RoutedTokens(np.array(experts), weights), np.array(here))
        for num_in_time, share, rho in itertools.product((0, 1, 3), (0.3, None), (1, 2)):
            waits = Waits(None, (0.0, 0.0), (1.0, 0.0), None, float(num_in_time))
            rules, masses = LayerRules(0, lists, rho, 0), []
            wanted = slow_late(rules, facts, num_in_time, share)
            for twins in (PLAIN, compiled):
                own = twins.of_pass(np.zeros(2, np.int64), Masses([0.0], [0.0]), 1, share)
                check_runs(twins.of_layer(rules)(facts, own, waits), wanted, rules, facts)
                masses.append(own.masses)
            assert masses[0] == masses[1], (facts, waits, share, rho)
            num_found += not np.array_equal(wanted, np.array(experts))
    assert num_found > 500


def test_experts_are_shared_out_alike(compiled: CompiledBuddies) -> None:
    """Ours among the assignments: times of few values, so that there are ties, and of any."""
    draw, plain, balance = np.random.default_rng(2), PLAIN.balance(), compiled.balance()
    num_sides = np.zeros(3, np.int64)
    for _ in range(scaled(NUM_RANDOM) // 10):
        facts = random_facts(draw)
        if draw.random() < 0.2:  # more tokens than tables have
            demand = facts.demand._replace(num_tokens=700 * facts.demand.num_tokens)
            facts = facts._replace(demand=demand)
        wanted, found = plain(facts), balance(facts)
        for ours, theirs in zip(wanted[:3], found[:3], strict=True):
            assert np.array_equal(ours, theirs) and ours.dtype == theirs.dtype, facts
        num_sides += [len(side) > 0 for side in found[:3]]
    assert (num_sides > scaled(NUM_RANDOM) // 40).all()


def random_facts(draw: np.random.Generator) -> Facts:
    """Of a layer beside a device, from no expert asked for to all."""
    num_experts = int(draw.integers(1, 60))
    hits = draw.integers(0, 4, num_experts) * draw.integers(0, 2, num_experts)
    is_here = draw.random(num_experts) < draw.random()
    experts = hits.nonzero()[0]
    is_even = bool(draw.random() < 0.5)

    def seconds(most: int) -> float:
        return float(draw.integers(0, most)) if is_even else most * float(draw.random())

    host_s = Curve([(1, seconds(8)), (2, 8 + seconds(8))])
    device_s = Curve([(1, 1 + seconds(3)), (2, 3 + seconds(3))])
    disk_s = seconds(6) * bool(draw.random() < 0.3)
    costs = Costs(1, seconds(5), host_s, device_s, device_s, 0.0, disk_s, 2)
    arriving_s = np.where(
        draw.random(len(experts)) < 0.5, np.inf, draw.integers(0, 4, len(experts))
    )
    return Facts(
        Step(StepKind.DECODE, 1),
        0,
        Demand(experts, hits[experts], is_here[experts]),
        is_here,
        np.array([num_experts]),
        costs,
        arriving_s if draw.random() < 0.5 else None,
        seconds(4),
        bool(draw.random() < 0.8),
    )


@pytest.mark.parametrize("experts", [[[0, 0]], [[1, 0]], [[-1, 2]], [[0, 4]]], ids=str)
def test_what_cannot_be_run_is_not_counted(compiled: CompiledBuddies, experts: object) -> None:
    asked = RoutedTokens(np.array([[0, 1]]), np.ones((1, 2), np.float32))
    for twins in (PLAIN, compiled):
        account = twins.of_pass(np.zeros(1, np.int64), Masses([0.0], [0.0]), 1, None)
        assert not account.move(0, asked, asked._replace(experts=np.array(experts)), 4)
        broken = asked._replace(weights=np.array([[1, np.nan]], np.float32))
        assert not account.move(0, asked, broken, 4)
        assert account.move(0, asked, asked, 4)
        assert account.masses == ([0.0], [0.0]) and account.moved == ([[0]], [0], [0])


def test_weights_that_are_none_are_a_fault(compiled: CompiledBuddies) -> None:
    lists = np.array([[1, 2], [2, 0], [1, 0]], np.int32)
    routing = RoutedTokens(np.array([[0, 1]]), np.array([[0.5, np.nan]], np.float32))
    facts = routed_facts(routing, np.array([True, False, True]))
    for twins in (PLAIN, compiled):
        own = twins.of_pass(np.zeros(1, np.int64), Masses([0.0], [0.0]), 1, None)
        with pytest.raises(InternalError, match="not finite"):
            twins.of_layer(LayerRules(0, lists, 2, 0))(facts, own)
        assert own.moved == ([[0]], [0], [0])


def test_an_account_of_the_other_twins_is_refused(compiled: CompiledBuddies) -> None:
    """It would be passed over: nothing bounded, nothing counted."""
    [case] = random_cases(1, 3)
    with pytest.raises(InternalError, match="not in a PlainAccount"):
        compiled.of_layer(case.rules)(case.facts, account(3))
