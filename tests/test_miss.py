"""Gates by worked examples, miss policies by what must hold of every answer of theirs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from buddy_cases import random_buddies, random_profile, random_routing, routed_facts
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from lowtide.core import Costs, Facts, IntArray, RoutedTokens, RowKind, StepKind
from lowtide.errors import UsageError
from lowtide.policies.buddy_gates import Gates, Psi, absent_shares, token_margins
from lowtide.policies.buddy_lists import BuddyLists
from lowtide.policies.buddy_profile import QualityCurve, token_entropy
from lowtide.policies.buddy_search import UNBOUNDED
from lowtide.policies.catalogue import CATALOGUE
from lowtide.policies.miss import Buddy, CachePrior, Drop, RandomBuddy, Rho, Weighing
from lowtide.policies.presets import check_safe, lossless_presets, parse_options
from lowtide.policies.receipt import Receipts
from lowtide.policies.recipe import Setting
from lowtide.policies.substitution import Substitution, check_substituted, replaced

OPEN = Gates()
ALL = Rho(UNBOUNDED)
NO_PSI = Psi()


def one_layer(ids: list[list[int]], q: list[list[float]] | None = None) -> BuddyLists:
    """Lists of one layer, as they are."""
    length = max(map(len, ids))
    padded = [[*row, *[-1] * (length - len(row))] for row in ids]
    scores = q or [[1 / (1 + rank) for rank in range(length)] for _ in ids]
    lengths = np.array([[len(row) for row in ids]], np.int32)
    table = np.array(scores, np.float32)[None]
    return BuddyLists(np.array(padded, np.int32)[None], table, lengths, np.ones(1))


# Expert 0 is here and so are 1 and 2; 3, 4 and 5 are not.
HERE = np.array([True, True, True, False, False, False])
LISTS = one_layer([[1], [0], [0], [1, 2], [2, 1], [0]])
ROUTING = RoutedTokens(
    np.array([[0, 3, 4], [1, 2, 5]]), np.array([[0.2, 0.5, 0.3], [0.3, 0.3, 0.4]], np.float32)
)


def buddy(gates: Gates = OPEN, rho: Rho = ALL, **changes: Any) -> Buddy:
    return Buddy(**{"lists": LISTS, "gates": gates, "psi": NO_PSI, "rho": rho, **changes})


def test_buddies_take_the_places_and_the_weights_of_those_they_stand_in_for() -> None:
    answer = buddy()(routed_facts(ROUTING, HERE))
    assert answer is not None
    assert answer.experts.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert answer.weights.tolist() == np.float32([[0.2, 0.5, 0.3], [0.4, 0.3, 0.3]]).tolist()
    half = buddy(rho=Rho())(routed_facts(ROUTING, HERE))  # one of three: the first rank's
    assert half is not None and half.experts.tolist() == [[0, 1, 4], [0, 1, 2]]
    assert buddy(rho=Rho(0))(routed_facts(ROUTING, HERE)) is None
    assert buddy()(routed_facts(ROUTING, np.ones(6, np.bool_))) is None


def test_an_expert_on_its_way_is_not_absent() -> None:
    facts = routed_facts(ROUTING, HERE)
    coming = np.where(facts.demand.experts == 3, 0.1, np.inf)
    answer = buddy()(facts._replace(arriving_s=coming))
    assert answer is not None and answer.experts.tolist() == [[0, 2, 3], [0, 1, 2]]


def test_entropy_and_margin_keep_tokens_as_they_are() -> None:
    entropies = token_entropy(ROUTING.weights)
    p = np.float64([0.2, 0.5, 0.3])
    assert entropies[0] == pytest.approx(-(p * np.log(p)).sum() / np.log(3))
    between = Gates(entropies=np.array([entropies.mean()]))
    answer = buddy(between)(routed_facts(ROUTING, HERE))
    assert answer is not None and answer.experts.tolist() == [[0, 3, 4], [0, 1, 2]]
    # At the threshold itself it is forbidden.
    assert buddy(Gates(entropies=np.array([entropies.max()])))(routed_facts(ROUTING, HERE)) is None
    assert token_margins(ROUTING.weights) == pytest.approx([0.2, 0.1])
    kept = buddy(Gates(margin=0.15))(routed_facts(ROUTING, HERE))
    assert kept is not None and kept.experts.tolist() == [[0, 3, 4], [0, 1, 2]]
    assert token_margins(np.ones((2, 1), np.float32)).tolist() == [1, 1]
    assert token_entropy(np.ones((2, 1), np.float32)).tolist() == [0, 0]


def test_beta_bypasses_a_layer_with_too_many_absent() -> None:
    facts = routed_facts(ROUTING, HERE)  # 3 of 6
    assert absent_shares(facts, ROUTING).tolist() == [0.5, 0.5]
    assert buddy(Gates(beta=0.5))(facts) is None
    assert buddy(Gates(beta=0.51))(facts) is not None
    assert buddy(Gates(beta=0.0))(facts) is None


def test_the_routers_own_logits_change_which_buddy_comes_first() -> None:
    lists = one_layer([[1], [0], [0], [1, 2], [2, 1], [0]], [[0.5, 0.4]] * 6)
    scores = np.zeros((2, 6), np.float32)
    scores[0, 2] = 3.0
    liked = routed_facts(ROUTING._replace(scores=scores), HERE)
    answer = buddy(lists=lists, psi=Psi(eta=1.0), rho=Rho(1))(liked)
    assert answer is not None and answer.experts.tolist() == [[0, 2, 4], [0, 1, 2]]
    plain = buddy(lists=lists, rho=Rho(1))(liked)
    assert plain is not None and plain.experts.tolist() == [[0, 1, 4], [0, 1, 2]]


@pytest.mark.parametrize(
    ("kind", "gates"),
    [(RowKind.PROMPT, Gates(in_prefill=True)), (RowKind.COMMIT, Gates(in_commit=True))],
)
def test_rows_whose_outcome_lasts_are_exact_unless_asked(kind: RowKind, gates: Gates) -> None:
    facts = routed_facts(ROUTING, HERE, kind=kind)
    assert buddy()(facts) is None
    assert buddy(gates)(facts) is not None
    # What nobody told more of goes by the kind of its pass.
    untold = facts._replace(step=facts.step.__class__(StepKind.PREFILL, 0))
    assert (buddy()(untold) is None) and (buddy(Gates(in_prefill=True))(untold) is not None)


def test_a_budget_of_bytes_gives_up_what_it_has_no_room_for() -> None:
    """Of 3, 4 and 5 with masses 0.5, 0.3 and 0.4 two fit: 4 is given up."""
    facts = routed_facts(ROUTING, HERE, costs=Costs.unknown(10))
    answer = buddy(step_bytes=20)(facts)
    assert answer is not None and answer.experts.tolist() == [[0, 2, 3], [1, 2, 5]]
    assert buddy(step_bytes=30)(facts) is None
    none = buddy(step_bytes=9)(facts)
    assert none is not None and none.experts.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_a_budget_of_bytes_is_each_pass_s_own_also_where_its_first_layer_needs_nothing() -> None:
    """Without receipts a policy is not asked of a layer whose experts are all here."""
    lists = BuddyLists(*(np.repeat(array, 2, axis=0) for array in LISTS))
    policy = buddy(lists=lists, step_bytes=20)
    for _ in range(3):
        facts = routed_facts(ROUTING, HERE, layer=1, num_layers=2, costs=Costs.unknown(10))
        answer = policy(facts)
        assert answer is not None and answer.experts.tolist() == [[0, 2, 3], [1, 2, 5]]


def test_drop_adds_nothing_in_place_of_the_absent() -> None:
    answer = Drop(OPEN, ALL)(routed_facts(ROUTING, HERE))
    assert answer is not None and answer.experts.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert answer.weights.tolist() == np.float32([[0.2, 0, 0], [0, 0.3, 0.3]]).tolist()


def test_cache_prior_chooses_anew_and_weighs_as_the_router_does() -> None:
    logits = np.float32([[2.0, 1.5, 0.0, 1.9, 1.0, -5.0]])
    routing = RoutedTokens(np.array([[0, 3]]), np.zeros((1, 2), np.float32), logits)
    weighing = Weighing(is_sigmoid=False, normalise=True, scaling_factor=2.0)
    facts = routed_facts(routing, HERE)
    assert CachePrior(OPEN, 0.3, weighing)(facts) is None
    answer = CachePrior(OPEN, 0.5, weighing)(facts)
    assert answer is not None and answer.experts.tolist() == [[0, 1]]
    share = 1 / (1 + np.exp(-0.5))
    assert answer.weights[0] == pytest.approx([2 * share, 2 * (1 - share)])


def slow_cache_prior(facts: Facts, prior: float) -> IntArray:
    """The best k of raised logits, where nobody is absent but those who are not here."""
    routing = facts.routing
    assert routing is not None and routing.scores is not None
    raised = routing.scores + prior * facts.is_kept
    k = routing.experts.shape[1]
    return np.sort(np.argsort(-raised, axis=1, kind="stable")[:, :k], axis=1)


@given(st.integers(0, 10_000), st.floats(0.01, 3.0))
@examples(50)
def test_cache_prior_is_the_best_of_raised_logits(seed: int, prior: float) -> None:
    draw = np.random.default_rng(seed)
    scores = draw.normal(size=(6, 9)).astype(np.float32)
    experts = np.sort(np.argsort(-scores, axis=1)[:, :3], axis=1)
    routing = RoutedTokens(experts, np.ones((6, 3), np.float32), scores)
    facts = routed_facts(routing, draw.random(9) < 0.5)
    answer = CachePrior(OPEN, prior, Weighing(True, True, 1.0))(facts)
    found = experts if answer is None else answer.experts
    assert np.array_equal(found, slow_cache_prior(facts, prior))


def policies_of(num_layers: int, num_experts: int, rho: Rho) -> list[Substitution]:
    lists = random_buddies(num_layers, num_experts)
    return [
        Buddy(lists, OPEN, NO_PSI, rho),
        Buddy(lists, OPEN, NO_PSI, rho, step_bytes=40),
        RandomBuddy(OPEN, rho, seed=1),
        Drop(OPEN, rho),
        CachePrior(OPEN, 1.0, Weighing(False, True, 1.0)),
    ]


@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.05, 0.2, 1.0]), st.integers(1, 3))
@examples(40)
def test_no_bound_is_ever_exceeded(seed: int, max_mass: float, rho: int) -> None:
    num_layers, num_experts, k = 2, 10, 4
    for policy in policies_of(num_layers, num_experts, Rho(rho)):
        draw = np.random.default_rng(seed)
        receipts = Receipts(num_layers, max_mass)
        for _ in range(4):
            for layer in range(num_layers):
                facts = random_layer(draw, layer, num_layers, num_experts, k)
                run_layer(policy, facts, receipts, rho)
                for request in (0, 1, 2):
                    receipt = receipts.of(request)
                    assert receipt is None or receipt.moved_share <= max_mass


@given(st.integers(0, 10_000), st.sampled_from([0.17, 0.37, 0.53, 0.83]))
@examples(40)
def test_no_layer_has_more_replaced_than_beta_allows(seed: int, beta: float) -> None:
    """Whatever stands in: of what a layer asks for less than that share is replaced."""
    gates, draw = Gates(beta=beta), np.random.default_rng(seed)
    policies: list[Substitution] = [
        Buddy(random_buddies(1, 10), gates, NO_PSI, ALL),
        RandomBuddy(gates, ALL, seed=1),
        Drop(gates, ALL),
        CachePrior(gates, 1.0, Weighing(False, True, 1.0)),
    ]
    facts = random_layer(draw, 0, 1, 10, 4)
    routing = facts.routing
    assert routing is not None
    for answer in (policy(facts) for policy in policies):
        if answer is not None:
            moved = np.unique(routing.experts[replaced(routing, answer)])
            assert 0 < len(moved) < beta * len(facts.demand.experts)


def random_layer(
    draw: np.random.Generator, layer: int, num_layers: int, num_experts: int, k: int
) -> Facts:
    routing = random_routing(draw, 5, num_experts, k)
    scores = draw.normal(size=(5, num_experts)).astype(np.float32)
    is_here, requests = draw.random(num_experts) < 0.5, draw.integers(0, 3, 5)
    return routed_facts(
        routing._replace(scores=scores),
        is_here,
        layer=layer,
        num_layers=num_layers,
        requests=requests,
    )


def run_layer(policy: Substitution, facts: Facts, receipts: Receipts, rho: int) -> None:
    routing = facts.routing
    assert routing is not None
    answer = policy(facts._replace(left=receipts.route(facts, routing)))
    if answer is None:
        return
    check_substituted(answer, routing, len(facts.is_kept))
    receipts.substitute(facts, routing, answer)
    is_moved = replaced(routing, answer)
    assert is_moved.any() and not facts.is_kept[routing.experts[is_moved]].any()
    if not isinstance(policy, CachePrior):
        assert (is_moved.sum(axis=1) <= rho).all()


def test_a_receipt_says_what_was_done() -> None:
    receipts = Receipts(2)
    requests = np.array([7, 8])
    step = routed_facts(ROUTING, HERE, requests=requests).step
    for layer in range(2):
        facts = routed_facts(ROUTING, HERE, layer=layer, num_layers=2)._replace(step=step)
        receipts.route(facts, ROUTING)
        if layer == 0:
            answer = buddy()(facts)
            assert answer is not None
            receipts.substitute(facts, ROUTING, answer)
            # 3 and 5 are not read for it; 4 comes all the same.
            receipts.settle(ROUTING, answer, np.array([0.0, 0, 0, 10, 0, 10]), 20.0)
    first, second = receipts.take(7), receipts.take(8)
    assert first is not None and second is not None and receipts.take(7) is None
    assert (first.num_tokens, first.num_affected, first.substitutions) == (1, 1, (2, 0))
    assert (first.saved_bytes, first.num_in_vain) == (10, 1)
    assert first.moved_share == pytest.approx(0.4) and first.routed_mass == pytest.approx(2.0)
    assert (second.substitutions, second.saved_bytes, second.num_in_vain) == ((1, 0), 10, 0)
    assert second.as_dict()["moved_share"] == pytest.approx(0.2)


def setting(**options: str) -> Setting:
    made = parse_options("buddymoe", {"miss": "buddy", **options})
    return Setting([4, 4], 8, Costs.unknown(10), options=made, buddies=random_profile(2, 8, 3))


def made(**options: str) -> Any:
    return CATALOGUE["buddymoe"].policies_without_device(setting(**options))


def test_the_preset_takes_its_options() -> None:
    assert isinstance(made().substitution, Buddy)
    assert isinstance(made(miss="random").substitution, RandomBuddy)
    for options in ({"miss": "wait"}, {"rho": "0"}):
        exact = made(**options)
        assert exact.substitution is None and not exact.asks_routing
    assert not made().asks_scores and made(eta="0.1").asks_scores
    assert made(alpha="0.5,0.9").substitution is not None
    assert made(alpha="fit:2").substitution is not None
    assert made(beta="64MiB", tae="10", temperature="0.9", margin="0.5").substitution is not None
    assert "buddymoe" not in lossless_presets()
    for placement in ("lru", "tide", "dali", "lowtide"):
        policies = made(placement=placement)
        assert type(policies.placement).__name__.lower().startswith(placement[:3])


def test_mass_is_bounded_unless_it_is_said_otherwise() -> None:
    bound = CATALOGUE["buddymoe"].max_mass
    assert bound(setting()) == 0.05
    assert bound(setting(max_mass="off")) is None and bound(setting(max_mass="0.4")) == 0.4
    curve = QualityCurve(np.array([0.1, 0.2]), np.array([0.01, 0.1]), "1" * 64)

    def measured(**options: str) -> Setting:
        one = setting(**options)
        assert one.buddies is not None
        return replace(one, buddies=replace(one.buddies, curve=curve))

    estimated = curve.max_mass(0.1)
    assert estimated > 0.05 and bound(measured()) == 0.05
    assert bound(measured(max_kl="0.1")) == estimated  # the default bounds no estimate
    assert bound(measured(max_kl="0.1", max_mass="0.02")) == 0.02
    assert bound(measured(max_kl="0.1", max_mass="off")) == estimated


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"alpha": "0"}, "above 0 to 1"),
        ({"alpha": "1.5"}, "above 0 to 1"),
        ({"alpha": "0.5,2"}, "above 0 and at most 1"),
        ({"alpha": "0.5,0.5,0.5"}, "3 values"),
        ({"alpha": "fit:99"}, "cannot be"),
        ({"k_max": "0"}, "from 1 to 64"),
        ({"rho": "-1"}, "from 0 to 64"),
        ({"beta": "2"}, "bytes of a pass"),
        ({"beta": "1e-9XB"}, "bytes of a pass"),
        ({"tae": "nan"}, "from 0 to 100"),
        ({"temperature": "0"}, "above 0 to 100"),
        ({"margin": "inf"}, "from 0 to 1"),
        ({"search_rank": "0"}, "from 1 to 64"),
        ({"search_rank": "9"}, "beyond the lists, of which the longest has"),
        ({"max_mass": "1.01"}, "from 0 to 1"),
        ({"max_kl": "0.1"}, "lowtide quality"),
        ({"miss": "perhaps"}, "buddy"),
        ({"placement": "resident"}, "placement must be"),
        ({"placement": "lru", "tau": "3"}, "placement=lru has no option 'tau'"),
        ({"miss": "late", "beta": "64MiB"}, "beta in bytes .* for miss=buddy alone"),
        ({"miss": "drop", "beta": "64MiB"}, "beta in bytes .* for miss=buddy alone"),
        ({"miss": "late", "prior": "2"}, "miss=late has no use for prior.* miss=cache-prior"),
        ({"miss": "cache-prior", "rho": "1"}, "miss=cache-prior has no use for rho"),
        ({"miss": "random", "k_max": "4"}, "no use for k_max.* miss=buddy and miss=late; leave"),
        ({"miss": "drop", "eta": "1"}, "no use for eta"),
        ({"temperature": "0.9"}, "give tae a percentile"),
    ],
)
def test_options_that_cannot_be(options: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        made(**options)


def test_baselines_and_what_is_missing_are_refused_by_name() -> None:
    for miss in ("random", "drop", "cache-prior"):
        with pytest.raises(UsageError, match=f"miss={miss}.*--unsafe"):
            check_safe("buddymoe", {"miss": miss})
    check_safe("buddymoe", {"miss": "buddy"})
    check_safe("auto", {})
    CATALOGUE["buddymoe"].policies_without_device(Setting([4, 4], 8, Costs.unknown(10)))
    nobody = Setting([4, 4], 8, Costs.unknown(10), options={"miss": "buddy"})
    with pytest.raises(UsageError, match="lowtide calibrate --buddies"):
        CATALOGUE["buddymoe"].policies_without_device(nobody)
    with pytest.raises(UsageError, match="tae needs a buddy profile"):
        CATALOGUE["buddymoe"].policies_without_device(nobody.having(miss="random", tae=10.0))
    other = Setting([4], 8, Costs.unknown(10), options={}, buddies=random_profile(2, 8, 3))
    with pytest.raises(UsageError, match="another model: 2 MoE layers"):
        CATALOGUE["buddymoe"].policies_without_device(other)
