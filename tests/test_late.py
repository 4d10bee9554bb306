"""Ours: who is late by the cost model, and what is given up for all of a pass's tokens or none."""

from __future__ import annotations

import numpy as np
import pytest
from buddy_cases import random_buddies, random_routing, routed_facts
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from lowtide.core import Costs, Curve, Facts, RoutedTokens
from lowtide.policies.assignment import AllFetch, AllHost, Assign, Balance, HostAlone
from lowtide.policies.buddy_gates import Gates, Psi
from lowtide.policies.buddy_search import UNBOUNDED
from lowtide.policies.late import Late
from lowtide.policies.miss import LayerTwins, Rho
from lowtide.policies.plain_buddies import absent_of, late_queues
from lowtide.policies.receipt import Receipts
from lowtide.policies.substitution import check_substituted, replaced
from lowtide.policies.waits import waits_of

# Residents 0, 1 and 2 of 6; a resident takes 1 s for any number of tokens.
HERE = np.array([True, True, True, False, False, False])
ROUTING = RoutedTokens(
    np.array([[0, 3, 4], [1, 2, 5]]), np.array([[0.2, 0.5, 0.3], [0.3, 0.3, 0.4]], np.float32)
)


def costs(link_s: float = 1.0, host_s: float = 1.0, disk_s: float = 0.0) -> Costs:
    one_s = Curve([(1, 1.0)])
    return Costs(10, link_s, Curve([(1, host_s)]), one_s, one_s, 0.0, disk_s, 4)


NO_EXPERTS: tuple[list[int], int] = ([], 0)


def queues(facts: Facts, assign: Assign | None = None) -> list[tuple[list[int], int]]:
    layers = LayerTwins(random_buddies(1, 6), Gates(), Psi(), Rho())
    state = layers.state(facts, ROUTING)
    made = late_queues(state, absent_of(state), waits_of(facts, assign or HostAlone()))
    return [(queue.experts.tolist(), queue.num_late) for queue in made]


def test_a_host_alone_gives_up_reads_that_end_after_its_residents() -> None:
    """Residents 0, 1 and 2 take 3 s: 3 reads of 1 s fit, of 1.5 s two, of 4 s none."""
    for read_s, num_late in ((1.0, 0), (1.5, 1), (4.0, 3)):
        assert queues(routed_facts(ROUTING, HERE, costs=costs(read_s))) == [
            ([4, 5, 3], num_late),
            NO_EXPERTS,
            NO_EXPERTS,
        ]


def test_beside_a_device_disk_link_and_host_have_queues_of_their_own() -> None:
    facts = routed_facts(ROUTING, HERE, costs=costs(2.0), has_device=True)
    assert queues(facts, AllFetch()) == [([], 0), ([4, 5, 3], 2), ([], 0)]
    assert queues(facts._replace(link_s=2.0), AllFetch())[1] == ([4, 5, 3], 3)
    # The host has them done in time, or one of them.
    assert queues(facts, AllHost()) == [([], 0), ([], 0), ([4, 5, 3], 0)]
    slow = facts._replace(costs=costs(host_s=2.0))
    assert queues(slow, AllHost())[2] == ([4, 5, 3], 2)
    at_host = np.array([True, True, True, True, False, False])
    on_disk = facts._replace(is_at_host=at_host, costs=costs(2.0, disk_s=2.0))
    assert queues(on_disk, AllFetch()) == [([4, 5], 1), ([3], 0), ([], 0)]


def test_what_is_on_its_way_is_not_given_up() -> None:
    facts = routed_facts(ROUTING, HERE, costs=costs(9.0), has_device=True)
    coming = np.where(facts.demand.experts == 4, 1.0, np.inf)
    assert queues(facts._replace(arriving_s=coming), AllFetch())[1] == ([5, 3], 2)


def late(
    num_experts: int = 6,
    rho: int = UNBOUNDED,
    gates: Gates | None = None,
    assign: Assign | None = None,
) -> Late:
    lists = random_buddies(2, num_experts)
    return Late(lists, gates or Gates(), Psi(), Rho(rho), assign or Balance())


def test_costs_that_nobody_knows_give_up_nobody() -> None:
    assert late()(routed_facts(ROUTING, HERE, costs=Costs.unknown(10))) is None


@given(st.integers(0, 10_000), st.booleans(), st.sampled_from([0.05, 0.3, 1.0]), st.integers(1, 3))
@examples(60)
def test_an_expert_is_given_up_by_all_its_tokens_or_by_none(
    seed: int, has_device: bool, max_mass: float, rho: int
) -> None:
    draw, policy, receipts = np.random.default_rng(seed), late(12, rho), Receipts(2, max_mass)
    for layer in (0, 1, 0, 1):
        routing, is_here = random_routing(draw, 6, 12, 4), draw.random(12) < 0.6
        facts = routed_facts(
            routing,
            is_here,
            layer=layer,
            num_layers=2,
            requests=draw.integers(0, 2, 6),
            costs=costs(draw.choice([0.5, 2.0, 9.0]), draw.choice([0.5, 3.0])),
            has_device=has_device,
        )
        answer = policy(facts._replace(left=receipts.route(facts, routing)))
        if answer is None:
            continue
        check_substituted(answer, routing, 12)
        receipts.substitute(facts, routing, answer)
        is_moved = replaced(routing, answer)
        assert (is_moved.sum(axis=1) <= rho).all()
        for expert in np.unique(routing.experts[is_moved]).tolist():
            assert not is_here[expert] and expert not in answer.experts
        for request in (0, 1):
            receipt = receipts.of(request)
            assert receipt is None or receipt.moved_share <= max_mass


@given(st.integers(0, 10_000), st.booleans())
@examples(60)
def test_one_call_decides_as_two_do(seed: int, has_device: bool) -> None:
    """Our own assignment's waiting is found with the decision, any other's before it."""
    draw, own, other = np.random.default_rng(seed), late(12), late(12, assign=Balance().__call__)
    routing, is_here = random_routing(draw, 6, 12, 4), draw.random(12) < 0.6
    times = costs(draw.choice([0.5, 2.0, 9.0]), draw.choice([0.5, 3.0]), draw.choice([0.0, 2.0]))
    facts = routed_facts(routing, is_here, num_layers=2, costs=times, has_device=has_device)
    answers = [policy(facts) for policy in (own, other)]
    assert (answers[0] is None) == (answers[1] is None)
    if answers[0] is not None and answers[1] is not None:
        assert np.array_equal(answers[0].experts, answers[1].experts)


def test_a_closed_token_keeps_its_expert_for_all() -> None:
    """Expert 5 is late for both tokens, and one of them is of a prompt."""
    routing = RoutedTokens(np.array([[0, 5], [1, 5]]), np.full((2, 2), 0.5, np.float32))
    facts = routed_facts(routing, HERE, costs=costs(9.0))
    lists = random_buddies(1, 6)._replace(ids=np.array([[[0, 1, 2]] * 6], np.int32))
    policy = Late(lists, Gates(), Psi(), Rho(UNBOUNDED), HostAlone())
    answer = policy(facts)
    assert answer is not None and answer.experts.tolist() == [[0, 1], [0, 1]]
    facts.step.rows.kind[1] = 0
    assert policy(facts) is None


@pytest.mark.parametrize("rho", [0, 1])
def test_a_budget_of_none_changes_nothing(rho: int) -> None:
    facts = routed_facts(ROUTING, HERE, costs=costs(9.0))
    assert rho or late(rho=rho)(facts) is None
