"""BuddyMoE's rules and the receipt by worked examples, and what must hold of every answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from buddy_cases import (
    PLAIN,
    UNBOUNDED,
    account,
    arriving,
    random_lists,
    random_profile,
    random_routing,
    routed_facts,
)
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from lowtide.buddies import LayerRules, Masses
from lowtide.core import Costs, Curve, Facts, RoutedTokens, RowKind, StepKind
from lowtide.errors import UsageError
from lowtide.policies.assignment import Assign, Balance, HostAlone
from lowtide.policies.buddy_profile import QualityCurve, token_entropy
from lowtide.policies.buddymoe import Buddies, layer_rules
from lowtide.policies.catalogue import CATALOGUE
from lowtide.policies.placement import LRU, DaliWindow, Tide
from lowtide.policies.plain_buddies import token_margins
from lowtide.policies.presets import lossless_presets, parse_options
from lowtide.policies.receipt import Receipts
from lowtide.policies.recipe import PolicyInputs
from lowtide.policies.substitution import check_substituted, replaced

# Experts 0, 1 and 2 are here; 3, 4 and 5 are not.
HERE = np.array([True, True, True, False, False, False])
LISTS = np.array([[1, -1], [0, -1], [0, -1], [1, 2], [2, 1], [0, -1]], np.int32)
ROUTING = RoutedTokens(
    np.array([[0, 3, 4], [1, 2, 5]]), np.array([[0.2, 0.5, 0.3], [0.3, 0.3, 0.4]], np.float32)
)
FACTS = routed_facts(ROUTING, HERE)
OPEN = LayerRules(0, LISTS, UNBOUNDED, 0)
KEPT = 1 << RowKind.PROMPT | 1 << RowKind.COMMIT


def experts(facts: Facts = FACTS, assign: Assign | None = None, **rules: Any) -> Any:
    """Return the experts that run by these rules; None where that is the router's choice."""
    policy = Buddies([OPEN._replace(**rules)], PLAIN, assign)
    assert facts.routing is not None
    answer = policy.counted(facts, account(len(facts.routing.weights)))
    return None if answer is None else answer.experts.tolist()


def test_buddies_take_the_places_and_the_weights_of_those_they_stand_in_for() -> None:
    answer = PLAIN.of_layer(OPEN)(FACTS, account(2))
    assert answer is not None
    assert answer.experts.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert answer.weights.tolist() == np.float32([[0.2, 0.5, 0.3], [0.4, 0.3, 0.3]]).tolist()
    assert experts(rho=1) == [[0, 1, 4], [0, 1, 2]]  # the first rank's
    assert experts(rho=0) is None
    assert experts(routed_facts(ROUTING, np.ones(6, np.bool_))) is None
    coming = arriving(FACTS, np.arange(6) == 3)  # who is on its way is not absent
    assert experts(coming) == [[0, 2, 3], [0, 1, 2]]


def test_entropy_and_margin_keep_tokens_as_they_are() -> None:
    entropies = token_entropy(ROUTING.weights)
    p = np.float64([0.2, 0.5, 0.3])
    assert entropies[0] == pytest.approx(-(p * np.log(p)).sum() / np.log(3))
    assert experts(entropy=entropies.mean()) == [[0, 3, 4], [0, 1, 2]]
    assert experts(entropy=entropies.max()) is None  # at the threshold itself it is forbidden
    assert token_margins(ROUTING.weights) == pytest.approx([0.2, 0.1])
    assert experts(margin=0.15) == [[0, 3, 4], [0, 1, 2]]
    assert token_margins(np.ones((2, 1), np.float32)).tolist() == [1, 1]


def test_beta_bypasses_a_layer_with_too_many_absent() -> None:
    """3 of 6 are absent."""
    assert experts(beta=0.5) is None and experts(beta=0.0) is None
    assert experts(beta=0.51) is not None


@pytest.mark.parametrize("kind", [RowKind.PROMPT, RowKind.COMMIT])
def test_rows_whose_outcome_lasts_are_exact_unless_asked(kind: RowKind) -> None:
    facts = routed_facts(ROUTING, HERE, kind=kind)
    assert experts(facts, exact_kinds=KEPT) is None and experts(facts) is not None
    # What nobody told more of goes by the kind of its pass.
    untold = facts._replace(step=facts.step.__class__(StepKind.PREFILL, 0))
    assert experts(untold, exact_kinds=KEPT) is None and experts(untold) is not None


def costs(read_s: float, **changes: Any) -> Costs:
    """A resident expert takes one second per token, on the device as on the host."""
    each = Curve([(1, 1.0), (64, 64.0)])
    return replace(Costs(10, read_s, each, each, each, 0.0), **changes)


def test_a_host_alone_gives_up_reads_that_end_after_its_residents() -> None:
    """Three residents take three seconds; 4 has the least mass, then 5, then 3."""
    late = {"assign": HostAlone()}
    for read_s, wanted in (
        (4.0, [[0, 1, 2], [0, 1, 2]]),  # not one is there in time
        (2.0, [[0, 2, 3], [0, 1, 2]]),  # one is: that of most mass
        (1.5, [[0, 2, 3], [1, 2, 5]]),
        (1.0, None),
    ):
        assert experts(routed_facts(ROUTING, HERE, costs=costs(read_s)), **late) == wanted
    unknown = routed_facts(ROUTING, HERE, costs=Costs.unknown(10))
    assert experts(unknown, **late) is None


def test_beside_a_device_disk_link_and_host_have_queues_of_their_own() -> None:
    def fixed(facts: Facts) -> Any:
        assigned = Balance()(facts)
        return assigned._replace(
            resident=np.array([0, 1, 2]), fetch=np.array([3]), host=np.array([4, 5])
        )

    at_host = np.array([True, True, True, True, True, False])
    slow = costs(9.0, disk_read_s=9.0)
    facts = routed_facts(ROUTING, HERE, costs=slow, has_device=True)._replace(is_at_host=at_host)
    # 5 is on disk and 3 behind the link: too late; the host has computed 4 in time.
    assert experts(facts, fixed) == [[0, 1, 4], [0, 1, 2]]


def test_an_expert_is_given_up_by_all_its_tokens_or_by_none() -> None:
    """Expert 5 is late for both tokens, and one of them is of a prompt."""
    routing = RoutedTokens(np.array([[0, 5], [1, 5]]), np.full((2, 2), 0.5, np.float32))
    facts = routed_facts(routing, HERE, costs=costs(9.0))
    rules = {"lists": np.array([[0, 1, 2]] * 6, np.int32), "exact_kinds": KEPT}
    assert experts(facts, HostAlone(), **rules) == [[0, 1], [0, 1]]
    assert facts.step.rows is not None
    facts.step.rows.kind[1] = RowKind.PROMPT
    assert experts(facts, HostAlone(), **rules) is None


@given(
    st.integers(0, 10_000),
    st.sampled_from([0.0, 0.05, 0.2, 1.0]),
    st.integers(1, 3),
    st.sampled_from([np.inf, 0.37, 0.53]),
    st.booleans(),
)
@examples(60)
def test_no_bound_is_ever_exceeded(
    seed: int, max_mass: float, rho: int, beta: float, is_late: bool
) -> None:
    """Of a request's mass, of a token's experts, and of what a layer asks for."""
    num_layers, num_experts = 2, 10
    draw = np.random.default_rng(seed)
    rules = [
        LayerRules(layer, random_lists(draw, num_experts, num_experts, 6), rho, 0, beta=beta)
        for layer in range(num_layers)
    ]
    policy = Buddies(rules, PLAIN, HostAlone() if is_late else None)
    receipts = Receipts(num_layers, max_mass)
    for step in range(4 * num_layers):
        routing, layer = random_routing(draw, 5, num_experts, 4), step % num_layers
        is_here, requests = draw.random(num_experts) < 0.5, draw.integers(0, 3, 5)
        facts = routed_facts(
            routing, is_here, layer=layer, num_layers=2, requests=requests, costs=costs(0.7)
        )
        answer = policy.counted(facts, receipts.account(facts, routing))
        assert all(receipt.moved_share <= max_mass for receipt in receipts.all())
        if answer is None:
            continue
        check_substituted(answer, routing, num_experts)
        is_moved = replaced(routing, answer)
        moved = np.unique(routing.experts[is_moved])
        assert is_moved.any() and not is_here[moved].any()
        assert (is_moved.sum(axis=1) <= rho).all() and len(moved) < beta * 10
        if is_late:  # given up by all tokens, or by none
            assert not np.isin(moved, routing.experts[~is_moved]).any()


def test_a_receipt_says_what_was_done() -> None:
    receipts = Receipts(2)
    step = routed_facts(ROUTING, HERE, requests=np.array([7, 8])).step
    for layer in range(2):
        facts = routed_facts(ROUTING, HERE, layer=layer, num_layers=2)._replace(step=step)
        receipts.route(facts, ROUTING)
        if layer == 0:
            answer = PLAIN.of_layer(OPEN)(facts, account(2))
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


def test_a_pass_that_fails_counts_nothing() -> None:
    receipts, policy = Receipts(2), Buddies([OPEN, OPEN._replace(layer=1)], PLAIN)

    def run_pass() -> None:
        step = routed_facts(ROUTING, HERE, requests=np.array([7, 8])).step
        for layer in range(2):
            facts = routed_facts(ROUTING, HERE, layer=layer, num_layers=2)._replace(step=step)
            answer = policy.counted(facts, receipts.account(facts, ROUTING))
            assert answer is not None
            receipts.settle(ROUTING, answer, np.full(6, 10.0), 30.0)

    def counts() -> list[tuple[int, int, int, int]]:
        return [
            (each.num_tokens, each.num_affected, each.num_substituted, each.saved_bytes)
            for each in receipts.all()
        ]

    receipts.mark()
    receipts.take_back()  # before its first layer
    assert counts() == []
    run_pass()
    once, first = receipts.all(), counts()
    for _ in range(2):
        receipts.mark()
        run_pass()
        assert counts() != first
        receipts.take_back()
        assert receipts.all() == once
    receipts.mark()
    run_pass()
    assert counts() == [tuple(2 * count for count in each) for each in first]


def test_a_share_of_what_was_routed_may_be_moved() -> None:
    """A request may still move its share of the routed weight, less the weight already moved."""
    own = PLAIN.of_pass(np.array([0, 0]), Masses([2.0], [0.5]), 1, 0.25)
    left = own.route(ROUTING.weights)
    assert left is not None and left.mass.tolist() == pytest.approx([0.25 * 4 - 0.5])


def setting(**options: str) -> PolicyInputs:
    made = parse_options("buddymoe", options)
    return PolicyInputs([4, 4], 8, Costs.unknown(10), options=made, buddies=random_profile(2, 8, 3))


def made(**options: str) -> Any:
    return CATALOGUE["buddymoe"].policies_without_device(setting(**options))


def rules_of(**options: str) -> LayerRules:
    one = setting(**options)
    assert one.buddies is not None
    return layer_rules(one, one.buddies)[1]


def test_the_preset_takes_its_options() -> None:
    assert isinstance(made().substitution, Buddies) and "buddymoe" not in lossless_presets()
    for options in ({"miss": "wait"}, {"rho": "0"}):
        exact = made(**options)
        assert exact.substitution is None and not exact.asks_routing
    usual = rules_of()
    assert (usual.layer, usual.rho, usual.exact_kinds) == (1, 1, KEPT)
    assert 0 < usual.entropy < 1 and (usual.margin, usual.beta) == (np.inf, 0.9)
    for options in ({"miss": "late"}, {"tae": "off", "beta": "off"}):
        ungated = rules_of(**options)
        assert (ungated.entropy, ungated.margin, ungated.beta) == (-1, np.inf, np.inf)
    changed = rules_of(
        k_max="2", alpha="0.5", rho="none", beta="0.9", tae="10", margin="0.5", in_prefill="true"
    )
    assert changed.lists.shape == (8, 2) and changed.rho > 8 and changed.beta == 0.9
    assert changed.exact_kinds == 1 << RowKind.COMMIT
    assert 0 < changed.entropy < 1 and changed.margin == 0.5
    kinds = {"lru": LRU, "tide": Tide, "dali": DaliWindow}
    for placement, kind in kinds.items():
        assert isinstance(made(placement=placement).placement, kind)


def test_mass_is_bounded_unless_it_is_said_otherwise() -> None:
    bound = CATALOGUE["buddymoe"].max_mass
    assert bound(setting()) == 0.05
    assert bound(setting(max_mass="off")) is None and bound(setting(max_mass="0.4")) == 0.4
    curve = QualityCurve(np.array([0.1, 0.2]), np.array([0.01, 0.1]), "1" * 64)

    def measured(**options: str) -> PolicyInputs:
        one = setting(**options)
        assert one.buddies is not None
        return replace(one, buddies=replace(one.buddies, curve=curve))

    estimated = curve.max_mass(0.1)
    assert estimated > 0.05 and bound(measured()) == 0.05
    assert bound(measured(max_kl="0.1")) == estimated  # the default bounds no estimate
    assert bound(measured(max_kl="0.1", max_mass="0.02")) == 0.02
    assert bound(measured(max_kl="0.1", max_mass="off")) == estimated
    with pytest.raises(UsageError, match="--save-curve"):
        bound(setting(max_kl="0.1"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"alpha": "0"}, "above 0 to 1"),
        ({"alpha": "1.5"}, "above 0 to 1"),
        ({"k_max": "65"}, "from 1 to 64"),
        ({"rho": "some"}, "half, or none"),
        ({"tae": "101"}, "from 0 to 100"),
        ({"miss": "sometimes"}, "buddy or late or wait"),
        ({"placement": "lru", "tau": "3"}, "placement=lru has no option 'tau'"),
        ({"placement": "buddymoe"}, "placement must be"),
        ({"in_commit": "1"}, "true or false"),
        ({"search_rank": "4"}, "has no option 'search_rank'"),
    ],
)
def test_options_that_cannot_be(options: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        setting(**options)


def test_what_is_missing_is_refused_by_name() -> None:
    for miss in ("buddy", "late"):
        with pytest.raises(UsageError, match=f"miss={miss}.*calibrate --buddies MODEL --text"):
            CATALOGUE["buddymoe"].policies_without_device(replace(setting(miss=miss), buddies=None))
    with pytest.raises(UsageError, match="another model"):
        CATALOGUE["buddymoe"].policies_without_device(
            replace(setting(), buddies=random_profile(3, 8, 3))
        )
