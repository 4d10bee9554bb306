"""Substitution's twins: the compiled one decides and counts as the plain one, to the last bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from buddy_cases import (
    edge_searches,
    random_lists,
    random_routing,
    random_search,
    slow_search,
    small_searches,
)
from examples import scaled

from lowtide.buddies import (
    LayerRules,
    LayerState,
    LayerTwin,
    Masses,
    PassAccount,
    TokenGates,
    Waits,
)
from lowtide.core import Costs, Curve, Demand, Facts, IntArray, RoutedTokens, Step, StepKind
from lowtide.errors import InternalError
from lowtide.kernels.cpu.buddies import CompiledBuddies
from lowtide.policies.buddy_profile import token_entropy
from lowtide.policies.buddy_search import BuddySearch
from lowtide.policies.plain_buddies import PlainBuddies
from lowtide.policies.waits import waits_of

NUM_RANDOM = 10_000  # tokens
OPEN = TokenGates(0, 1.0, -1.0, np.inf, np.inf)
PLAIN = PlainBuddies()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> CompiledBuddies:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return CompiledBuddies.load()


def check_equal(one: RoutedTokens | None, other: RoutedTokens | None, what: object) -> bool:
    """Whether there is an answer at all."""
    assert (one is None) == (other is None), what
    if one is None or other is None:
        return False
    for mine, theirs in zip(one[:2], other[:2], strict=True):
        is_float = mine.dtype.kind == "f"
        assert np.array_equal(mine, theirs, equal_nan=is_float), what
        assert mine.dtype == theirs.dtype, what
    return True


def of_one_token(search: BuddySearch, token: int) -> tuple[LayerRules, LayerState]:
    """A token's experts are different ones, so who may be replaced can be said expert by expert:
    the others are on their way."""
    experts, weights, may = (part[token : token + 1] for part in search[:3])
    own = None if search.list_of is None else search.lists[search.list_of[token]]
    lists = np.full((len(search.is_here), search.lists.shape[1]), -1, np.int32)
    rules = LayerRules(search.lists if own is None else lists, search.search_rank, OPEN)
    arriving_s = np.where(may[0], np.inf, 1.0)
    kinds = np.full(1, 3, np.uint8)
    state = LayerState(
        experts, weights, kinds, search.is_here, arriving_s, own, None, None, search.rho
    )
    return rules, state


def check_algorithm_1(compiled: CompiledBuddies, search: BuddySearch) -> int:
    wanted, num_found = slow_search(search), 0
    for token, (row, own) in enumerate(zip(wanted, search.experts, strict=True)):
        rules, state = of_one_token(search, token)
        answer = compiled.of_layer(rules).replace_absent(state)
        order = np.argsort(row, kind="stable")
        if answer is None:
            assert np.array_equal(row, own), (search, token)
            continue
        assert np.array_equal(answer.experts[0], row[order]), (search, token)
        weights = search.weights[token][order]
        assert np.array_equal(answer.weights[0], weights, equal_nan=True), (search, token)
        num_found += 1
    return num_found


def test_algorithm_1_in_every_small_case(compiled: CompiledBuddies) -> None:
    assert sum(check_algorithm_1(compiled, search) for search in small_searches()) > 400


def test_algorithm_1_in_random_cases(compiled: CompiledBuddies) -> None:
    draw = np.random.default_rng(0)
    num_found = 0
    for _ in range(scaled(NUM_RANDOM) // 50):
        num_found += check_algorithm_1(compiled, random_search(draw))
    assert num_found > scaled(NUM_RANDOM) // 10


def test_algorithm_1_at_the_edge(compiled: CompiledBuddies) -> None:
    assert sum(check_algorithm_1(compiled, search) for search in edge_searches()) > 60


def random_layer(draw: np.random.Generator, most_tokens: int) -> tuple[LayerRules, LayerState]:
    """Of any size, with gates, bounds, lists of pairs' own and experts on their way, or without."""

    def perhaps(chance: float) -> bool:
        return bool(draw.random() < chance)

    num_experts = int(draw.integers(3, 30))
    k, num_tokens = (
        int(draw.integers(1, min(8, num_experts) + 1)),
        int(draw.integers(1, most_tokens + 1)),
    )
    length = int(draw.integers(1, 9))
    routing = random_routing(draw, num_tokens, num_experts, k, int(draw.integers(0, 5)))
    # Now and then exactly the entropy or the margin of one of the tokens, which is forbidden.
    entropy = float(draw.choice(token_entropy(routing.weights))) if perhaps(0.5) else 0.9
    gates = TokenGates(
        int(draw.integers(0, 4)),
        1.0,
        entropy if perhaps(0.3) else -1.0,
        float(draw.random()) if perhaps(0.3) else np.inf,
        float(draw.choice([0.25, 0.5, 0.9])) if perhaps(0.3) else np.inf,
    )
    is_here = draw.random(num_experts) < 0.3 + 0.7 * draw.random()
    asked = np.unique(routing.experts)
    num_owners = int(draw.integers(1, 4))
    is_bounded = perhaps(0.5)
    owns_lists = perhaps(0.3)
    state = LayerState(
        *routing[:2],
        draw.integers(0 if perhaps(0.5) else 3, 4, num_tokens).astype(np.uint8),
        is_here,
        np.where(draw.random(len(asked)) < 0.7, np.inf, 0.5) if perhaps(0.5) else None,
        random_lists(draw, num_tokens * k, num_experts, length) if owns_lists else None,
        draw.integers(0, num_owners, num_tokens) if is_bounded else None,
        draw.random(num_owners) * draw.choice([0.1, 2, 50]) if is_bounded else None,
        int(draw.choice([0, 1, 2, 3, 1 << 30])),
    )
    lists = random_lists(draw, num_experts, num_experts, length)
    return LayerRules(lists, int(draw.choice([1, 2, length, 1 << 30])), gates), state


def random_waits(draw: np.random.Generator, num_experts: int) -> Waits:
    queue_of = draw.integers(0, 4, num_experts).astype(np.uint8) if draw.random() < 0.5 else None
    starts_s, each_s = (tuple(draw.integers(0, 3, 2) * one) for one in (0.5, 0.25))
    host_s = draw.integers(0, 4, num_experts) * 0.25
    return Waits(queue_of, starts_s, each_s, host_s, float(draw.integers(0, 4)) * 0.25)  # type: ignore[arg-type]


def random_layers(
    num_layers: int = NUM_RANDOM // 25, most_tokens: int = 50
) -> Iterator[tuple[np.random.Generator, LayerRules, LayerState]]:
    draw = np.random.default_rng(1)
    for _ in range(scaled(num_layers)):
        yield draw, *random_layer(draw, most_tokens)


def test_absent_experts_are_replaced_alike(compiled: CompiledBuddies) -> None:
    num_found = 0
    for draw, rules, state in random_layers():
        num_fit = int(draw.choice([0, 0, 1, 3]))
        answers = [
            twins.of_layer(rules).replace_absent(state, num_fit) for twins in (PLAIN, compiled)
        ]
        num_found += check_equal(*answers, (rules, state, num_fit))
    assert num_found > scaled(NUM_RANDOM) // 125


def test_an_account_of_the_other_twins_is_refused(compiled: CompiledBuddies) -> None:
    """It would be passed over: nothing bounded, nothing counted."""
    _, rules, state = next(random_layers())
    owner = np.zeros(len(state.experts), np.int64)
    account = PLAIN.of_pass(owner, Masses([0.0], [0.0]), rules.layer + 1, 0.5)
    with pytest.raises(InternalError, match="not in a PlainAccount"):
        compiled.of_layer(rules).replace_absent(state._replace(account=account))


def test_late_experts_are_given_up_alike(compiled: CompiledBuddies) -> None:
    num_found = 0
    for draw, rules, state in random_layers(NUM_RANDOM // 8, 6):
        waits = random_waits(draw, len(state.is_here))
        answers = [twins.of_layer(rules).give_up_late(state, waits) for twins in (PLAIN, compiled)]
        num_found += check_equal(*answers, (rules, state, waits))
    assert num_found > scaled(NUM_RANDOM) // 80


def random_beside(draw: np.random.Generator, state: LayerState) -> Facts:
    """The layer of `state` beside a device: times of few values, so that there are ties, or any."""
    num_experts = len(state.is_here)
    hits = np.bincount(state.experts.ravel(), minlength=num_experts)
    experts = hits.nonzero()[0]
    facts = random_facts(draw)
    return facts._replace(
        demand=Demand(experts, hits[experts], state.is_here[experts]),
        is_kept=state.is_here,
        capacity=np.array([num_experts]),
        arriving_s=state.arriving_s,
        routing=RoutedTokens(*state[:2]),
        is_here=state.is_here,
        is_at_host=draw.random(num_experts) < 0.7 if draw.random() < 0.5 else None,
    )


def test_late_experts_beside_a_device_are_given_up_alike(compiled: CompiledBuddies) -> None:
    """In one call, as by the assignment, by whom that has wait and by who is given up for it."""
    num_found = 0
    for draw, rules, state in random_layers(NUM_RANDOM // 8, 6):
        facts = random_beside(draw, state)
        plain, other = (twins.of_layer(rules) for twins in (PLAIN, compiled))
        answers = [layer.give_up_late_beside(state, facts) for layer in (plain, other)]
        num_found += check_equal(*answers, (rules, state, facts))
        waits = waits_of(facts, compiled.balance())
        check_equal(answers[0], other.give_up_late(state, waits), (rules, state, facts))
    assert num_found > scaled(NUM_RANDOM) // 160


@pytest.mark.parametrize(
    "odd", [[np.nan], [np.inf, -np.inf], [0.0, -0.0], [np.nan, np.inf, -np.inf, -1.0, 1e-45, 3e38]]
)
def test_weights_that_no_router_gives_are_ordered_alike(
    compiled: CompiledBuddies, odd: list[float]
) -> None:
    num_found = 0
    for draw, rules, state in random_layers(NUM_RANDOM // 25, 6):
        values = draw.choice(np.array(odd, np.float32), state.weights.shape)
        is_odd = draw.random(state.weights.shape) < 0.4
        state = state._replace(weights=np.where(is_odd, values, state.weights))
        waits = random_waits(draw, len(state.is_here))
        num_fit = int(draw.choice([0, 0, 1, 3]))
        plain, other = (twins.of_layer(rules) for twins in (PLAIN, compiled))
        with np.errstate(all="ignore"):
            found = [layer.replace_absent(state, num_fit) for layer in (plain, other)]
            late = [layer.give_up_late(state, waits) for layer in (plain, other)]
        num_found += check_equal(*found, (rules, state, num_fit))
        check_equal(*late, (rules, state, waits))
    assert num_found > 40


def test_late_experts_in_every_small_case(compiled: CompiledBuddies) -> None:
    """Two tokens of two of four experts, every set of residents, every number that is late."""
    lists = np.array([[1, 2, 3], [0, 3, -1], [3, -1, -1], [2, 1, 0]], np.int32)
    pairs = list(itertools.combinations(range(4), 2))
    weights = np.array([[0.3, 0.7], [0.5, 0.5]], np.float32)
    kinds, owner = np.full(2, 3, np.uint8), np.zeros(2, np.int64)
    layers = [twins.of_layer(LayerRules(lists, 3, OPEN)) for twins in (PLAIN, compiled)]
    num_found = 0
    for experts, here in itertools.product(
        itertools.product(pairs, repeat=2), itertools.product([False, True], repeat=4)
    ):
        for deadline_s, left, rho in itertools.product((0, 1, 3), (0.6, 9.0), (1, 2)):
            state = LayerState(
                *(np.array(experts), weights, kinds, np.array(here)),
                *(None, None, owner, np.array([left]), rho),
            )
            waits = Waits(None, (0.0, 0.0), (1.0, 0.0), None, float(deadline_s))
            answers = [layer.give_up_late(state, waits) for layer in layers]
            num_found += check_equal(*answers, (state, waits))
    assert num_found > 500


def accounts(compiled: CompiledBuddies, owner: IntArray, share: float | None) -> list[PassAccount]:
    """Of three owners and two layers, of both twins."""
    before = Masses([0.0, 2.0, 3.0], [0.0, 0.05, 3.5])
    return [twins.of_pass(owner, before, 2, share) for twins in (PLAIN, compiled)]


def test_moved_pairs_are_counted_alike(compiled: CompiledBuddies) -> None:
    num_seen = 0
    for draw, rules, state in random_layers():
        both = accounts(compiled, draw.integers(0, 3, len(state.experts)), None)
        asked = RoutedTokens(state.experts, state.weights)
        for layer, rho in enumerate((1, 1 << 30)):  # more and more tokens are affected
            run = PLAIN.of_layer(rules).replace_absent(state._replace(rho=rho)) or asked
            assert all(one.move(layer, asked, run, len(state.is_here)) for one in both)
            moved, other = (account.moved for account in both)
            assert moved == other and both[0].masses == both[1].masses
            num_seen += sum(moved.pairs[layer])
            saved_bytes = draw.random(len(state.is_here)) * draw.integers(0, 2, len(state.is_here))
            saved, other_saved = (one.saved(asked, run, saved_bytes) for one in both)
            assert saved == other_saved
            given_up = np.setdiff1d(asked.experts, run.experts) if run is not asked else []
            assert sum(saved.shares) >= saved_bytes[given_up].sum() * (1 - 1e-9)
            assert (np.array(saved.in_vain) <= np.array(moved.pairs[layer])).all()
    assert num_seen > scaled(NUM_RANDOM) // 10


def test_one_call_decides_and_counts_as_three_do(compiled: CompiledBuddies) -> None:
    """What a layer's router gave, the decision within what that leaves, and what it moved."""
    num_found = 0
    for draw, rules, state in random_layers(NUM_RANDOM // 8, 6):
        share = None if draw.random() < 0.3 else float(draw.choice([0.0, 0.05, 0.3, 1.0]))
        owner, state = (
            draw.integers(0, 3, len(state.experts)),
            state._replace(owner=None, left=None),
        )
        facts, asked = random_beside(draw, state), RoutedTokens(state.experts, state.weights)
        waits = random_waits(draw, len(state.is_here))

        alone = facts._replace(has_idle_link=False, can_fetch=False)
        ways: list[Callable[[LayerTwin, LayerState], RoutedTokens | None]] = [
            lambda layer, state: layer.replace_absent(state, 1),
            lambda layer, state, waits=waits: layer.give_up_late(state, waits),  # type: ignore[misc]
            lambda layer, state, facts=facts: layer.give_up_late_beside(state, facts),  # type: ignore[misc]
            lambda layer, state, facts=alone: layer.give_up_late_alone(state, facts),  # type: ignore[misc]
        ]
        for way in ways:
            by_three, _ = accounts(compiled, owner, share)
            left = by_three.route(state.weights)
            bounded = state if left is None else state._replace(owner=left.owner, left=left.mass)
            wanted = way(PLAIN.of_layer(rules), bounded)
            if wanted is not None:
                by_three.move(0, asked, wanted, len(state.is_here))
            both = accounts(compiled, owner, share)
            for twins, account in zip((PLAIN, compiled), both, strict=True):
                answer = way(twins.of_layer(rules), state._replace(account=account))
                num_found += check_equal(wanted, answer, (rules, state, facts))
                assert account.masses == by_three.masses and account.moved == by_three.moved
    assert num_found > scaled(NUM_RANDOM) // 40


def test_experts_are_shared_out_alike(compiled: CompiledBuddies) -> None:
    """Ours among the assignments: times of few values, so that there are ties, and of any."""
    draw, plain, balance = np.random.default_rng(2), PLAIN.balance(), compiled.balance()
    num_sides = np.zeros(3, np.int64)
    for _ in range(scaled(NUM_RANDOM) // 10):
        facts = random_facts(draw)
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
        assert account.masses == ([0.0], [0.0]) and account.moved == ([[0]], [0])


def test_weights_that_are_none_are_a_fault_in_one_call(compiled: CompiledBuddies) -> None:
    lists, kinds = np.array([[1, 2], [2, 0], [1, 0]], np.int32), np.full(1, 3, np.uint8)
    for twins in (PLAIN, compiled):
        account = twins.of_pass(np.zeros(1, np.int64), Masses([0.0], [0.0]), 1, None)
        state = LayerState(
            *(np.array([[0, 1]]), np.array([[0.5, np.nan]], np.float32), kinds),
            *(np.array([True, False, True]), None, None, None, None, 2, account),
        )
        with pytest.raises(InternalError, match="not finite"):
            twins.of_layer(LayerRules(lists, 2, OPEN)).replace_absent(state)
        assert account.moved == ([[0]], [0])
