"""BuddyMoE by its text: Equations 1 to 6, Algorithm 1 and its options, in random cases.

The oracles are written from the paper, with loops and fractions, and share nothing with the
policies. Compiled and plain twins are both held to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from buddy_cases import PLAIN, random_lists, random_routing, routed_facts
from buddy_counts import random_routing as skewed_routing
from examples import scaled
from numpy.typing import NDArray

from lowtide.buddies import LayerRules, Masses
from lowtide.core import Costs, Facts, FloatArray, IntArray, RoutedTokens
from lowtide.errors import UsageError
from lowtide.kernels.cpu.buddies import CompiledBuddies
from lowtide.kernels.cpu.library import load_part
from lowtide.kernels.cpu.sources import DECISIONS
from lowtide.lab.buddies import CoActivations, ProfileChoices, layer_alphas
from lowtide.policies.buddy_profile import BuddyProfile, token_entropy
from lowtide.policies.buddymoe import METER_PASSES, BandwidthMeter, Buddies, layer_rules
from lowtide.policies.catalogue import CATALOGUE
from lowtide.policies.presets import parse_options
from lowtide.policies.receipt import Receipts
from lowtide.policies.recipe import PolicyInputs
from lowtide.replay.trace import TraceShape

NUM_CASES = 200


def draws() -> Iterator[np.random.Generator]:
    for seed in range(scaled(NUM_CASES)):
        yield np.random.default_rng(seed)


def entropy(weights: Sequence[float], temperature: float) -> float:
    """Return Eq. 1's TAE, its weights those of softmax(logits / T) over the chosen."""
    powers = [(w / max(weights)) ** (1 / temperature) for w in weights]
    shares = [p / sum(powers) for p in powers]
    return -sum(p * math.log(p) for p in shares if p) / math.log(len(shares))


def profile_of(
    draw: np.random.Generator, choices: ProfileChoices, num_layers: int = 2
) -> tuple[BuddyProfile, list[tuple[NDArray[np.int64], NDArray[np.float32]]]]:
    num_experts, k = int(draw.integers(4, 10)), int(draw.integers(2, 4))
    routed = skewed_routing(int(draw.integers(10**6)), num_layers, num_experts, k, 30)
    seen = CoActivations(TraceShape(num_layers, num_experts, k), choices)
    for layer, (ids, weights) in enumerate(routed):
        seen.count(layer, ids, weights)
    return seen.profile("00"), routed


def test_lists_are_the_exact_prefixes_of_what_was_counted() -> None:
    """Eqs. 4 to 6 in fractions, of tokens or of the lesser of two weights, alpha by layer."""
    for draw in draws():
        is_weighted = bool(draw.random() < 0.5)
        alphas = tuple(draw.choice([0.25, 0.5, 0.75, 0.9, 0.95, 1.0], 2).tolist())
        profile, routed = profile_of(draw, ProfileChoices(is_weighted, 1.0, alphas))
        lists = profile.lists(k_max=5)
        for layer, (ids, weights) in enumerate(routed):
            num_experts = profile.num_experts
            for own in range(num_experts):
                counts = {j: Fraction(1) for j in range(num_experts) if j != own}  # smoothing
                for chosen, of_token in zip(ids.tolist(), weights, strict=True):
                    if own not in chosen:
                        continue
                    share = of_token.astype(float) / of_token.astype(float).sum()
                    p = dict(zip(chosen, share.tolist(), strict=True))
                    for j in chosen:
                        if j != own:
                            units = round(min(p[own], p[j]) * 2**20)
                            counts[j] += Fraction(units, 2**20) if is_weighted else 1
                if not (ids == own).any():
                    assert (lists[layer, own] == -1).all()
                    continue
                ranked = sorted(counts, key=lambda j: (-counts[j], j))
                need = Fraction(str(alphas[layer])) * sum(counts.values())
                wanted, covered = [], Fraction(0)
                while covered < need:
                    wanted.append(ranked[len(wanted)])
                    covered += counts[wanted[-1]]
                found = [j for j in lists[layer, own].tolist() if j >= 0]
                assert found == wanted[:5], (layer, own, alphas)


def test_no_list_is_one_too_long_where_a_share_is_exact() -> None:
    """19 of 20 are 0.95, which sums of floats may miss."""
    for num_peers in range(2, 40):
        counts = np.full((1, num_peers + 1, num_peers + 1), 19, np.int64)
        counts[0][np.diag_indices(num_peers + 1)] = 0
        per_expert = counts.sum(axis=2)
        sample = np.full((1, 1, 2), 0.5, np.float32)
        num_tokens = int(per_expert.sum()) // 2
        profile = BuddyProfile("00", num_tokens, per_expert, counts, sample)
        for percent in range(5, 101, 5):
            wanted = -(-percent * num_peers // 100)
            assert (profile.peers_that_cover(percent / 100) == wanted).all()


def test_entropy_and_its_percentile_at_a_temperature() -> None:
    for draw in draws():
        temperature = float(draw.choice([0.8, 1.0, 1.2]))
        weights = draw.random((6, 3)).astype(np.float32) + 0.01
        wanted = [entropy([float(w) for w in row], temperature) for row in weights]
        assert token_entropy(weights, temperature) == pytest.approx(wanted, abs=1e-6)
    choices = ProfileChoices(temperature=0.8)
    profile, routed = profile_of(np.random.default_rng(0), choices)
    for layer, (_, weights) in enumerate(routed):
        every = [entropy([float(w) for w in row], 0.8) for row in weights]
        threshold = profile.entropy_threshold(15)[layer]
        assert threshold == pytest.approx(np.percentile(every, 15), abs=1e-5)


@pytest.fixture(scope="module")
def compiled() -> CompiledBuddies:
    return CompiledBuddies(load_part(DECISIONS))


def algorithm_1(
    rules: LayerRules, psi_of: FloatArray, facts: Facts, z: FloatArray, temperature: float
) -> IntArray:
    """Return ids in the places of those that they stand in for: the gates, Psi, Algorithm 1.

    psi_of [num_experts, num_experts]: q * (1 - kappa * hop). z [tokens, num_experts].
    """
    assert facts.routing is not None and facts.is_here is not None
    experts, weights, _ = facts.routing
    out = experts.copy()
    asked = {int(e) for e in experts.ravel()}
    absent = {e for e in asked if not facts.is_here[e]}
    if len(absent) / len(asked) >= rules.beta:
        return out
    for t in range(len(out)):
        if entropy([float(w) for w in weights[t]], temperature) <= rules.entropy:
            continue
        used, spent = set(experts[t].tolist()), 0
        for place in sorted(range(out.shape[1]), key=lambda i: (-float(weights[t, i]), i)):
            own = int(experts[t, place])
            if own not in absent or spent >= rules.rho:
                continue
            listed = [int(j) for j in rules.lists[own] if j >= 0]
            psi = {j: psi_of[own, j] * (1 + rules.eta * z[t, j]) for j in listed}
            free = [j for j in listed if facts.is_here[j] and j not in used]
            if free:
                best = max(free, key=lambda j: (psi[j], -listed.index(j)))
                out[t, place] = best
                used.add(best)
                spent += 1
    return out


def test_psi_orders_the_buddies(compiled: CompiledBuddies) -> None:
    """Eq. 3 with eta, kappa and hop; both gates, at a temperature; plain and compiled."""
    num_moved = num_other = 0
    for draw in draws():
        num_experts, k, num_tokens = int(draw.integers(4, 12)), int(draw.integers(2, 4)), 20
        routing = random_routing(draw, num_tokens, num_experts, k, int(draw.integers(0, 4)))
        logits = draw.normal(size=(num_tokens, num_experts)).astype(np.float32)
        facts = routed_facts(routing._replace(scores=logits), draw.random(num_experts) < 0.7)
        q = draw.random((num_experts, num_experts))
        eta, kappa = float(draw.choice([0.0, 4.0, 20.0])), float(draw.choice([0.0, 0.4]))
        partition = np.arange(num_experts) * 2 // num_experts
        hop = np.abs(partition[:, None] - partition)
        psi_of = q * (1 - kappa * hop)
        lists = random_lists(draw, num_experts, num_experts, 5)
        for own, row in enumerate(lists):  # as profiles have them: by what all tokens share
            listed = sorted((int(j) for j in row if j >= 0), key=lambda j: -psi_of[own, j])
            row[: len(listed)] = listed
        psi = np.where(lists >= 0, np.take_along_axis(psi_of, lists.clip(0), 1), -np.inf)
        temperature = float(draw.choice([0.8, 1.0, 1.2]))
        rules = LayerRules(
            0,
            lists.astype(np.int32),
            int(draw.choice([1, 2, 9])),
            0,
            entropy=float(draw.choice([-1.0, 0.8])),
            beta=float(draw.choice([0.5, np.inf])),
            temperature=temperature,
            eta=eta,
            psi=psi if eta else None,
        )
        e = np.exp(logits.astype(float) - logits.max(axis=1, keepdims=True))
        z = e / e.sum(axis=1, keepdims=True)
        wanted = algorithm_1(rules, psi_of, facts, z, temperature)
        order = np.argsort(wanted, axis=1)
        for twins in (PLAIN, compiled):
            own = twins.of_pass(np.zeros(num_tokens, np.int64), Masses([0.0], [0.0]), 1, None)
            answer = twins.of_layer(rules)(facts, own) or routing
            assert np.array_equal(answer.experts, np.take_along_axis(wanted, order, 1))
            weights = np.take_along_axis(routing.weights, order, 1)
            assert np.array_equal(answer.weights, weights)
            assert own.moved.hops == [0], "one device"
        crossing = PLAIN.of_pass(np.zeros(num_tokens, np.int64), Masses([0.0], [0.0]), 1, None)
        PLAIN.of_layer(rules._replace(partition=partition))(facts, crossing)
        assert crossing.moved.hops == [int(hop[routing.experts, wanted].sum())]
        num_moved += int((wanted != routing.experts).sum())
        by_list = algorithm_1(rules._replace(eta=0.0), psi_of, facts, z, temperature)
        num_other += int((by_list != wanted).sum())
    assert num_moved > 250 and num_other > 20


def inputs_of(profile: BuddyProfile, **options: str) -> PolicyInputs:
    made = parse_options("buddymoe", options)
    shape = [profile.num_experts // 2] * profile.num_layers
    return PolicyInputs(
        shape, profile.num_experts, Costs.unknown(10), options=made, buddies=profile
    )


def test_kappa_sorts_the_lists_by_partition() -> None:
    """Experts lie on partitions in equal ranges; buddies are those of alpha all the same."""
    for draw in draws():
        profile, _ = profile_of(draw, ProfileChoices())
        num_experts, q = profile.num_experts, profile.q()
        for parts, kappa in ((1, 0.7), (2, 0.7), (3, 0.3)):
            options = {"kappa": str(kappa), "partitions": str(parts), "eta": "0.5"}
            rules = layer_rules(inputs_of(profile, **options), profile)
            for layer, lists in enumerate(profile.lists()):
                for own, row in enumerate(lists):
                    listed = [int(j) for j in row if j >= 0]
                    psi = {
                        j: q[layer, own, j]
                        * (1 - kappa * abs(j * parts // num_experts - own * parts // num_experts))
                        for j in listed
                    }
                    wanted = sorted(listed, key=lambda j: (-psi[j], listed.index(j)))
                    found = rules[layer].lists[own]
                    assert found[found >= 0].tolist() == wanted
                    assert rules[layer].psi is not None
                    of_list = rules[layer].psi[own, : len(wanted)].tolist()  # type: ignore[index]
                    assert of_list == pytest.approx([psi[j] for j in wanted])


def test_the_profiles_choices_are_the_rules() -> None:
    profile, _ = profile_of(
        np.random.default_rng(1), ProfileChoices(temperature=1.2, alphas=(0.5, 1.0))
    )
    rules = layer_rules(inputs_of(profile), profile)
    assert [rule.temperature for rule in rules] == [1.2, 1.2]
    entropies = profile.entropy_threshold(15)
    assert [rule.entropy for rule in rules] == entropies.tolist()
    lengths = [(rule.lists >= 0).sum(axis=1).mean() for rule in rules]
    assert lengths[0] < lengths[1] == profile.num_experts - 1
    named = layer_rules(inputs_of(profile, alpha="1"), profile)
    assert (named[0].lists >= 0).sum(axis=1).mean() == profile.num_experts - 1


def test_alphas_of_layers() -> None:
    assert layer_alphas("0.9", 3) == (0.9,) * 3
    assert layer_alphas("0.9,0.95,1", 3) == (0.9, 0.95, 1.0)
    assert layer_alphas("0.99:0.9", 4) == (0.99, 0.96, 0.93, 0.9)
    for wrong in ("", "0", "1.1", "0.9,0.9", "0.9:0.8:0.7", "much", "0.9:0", "nan"):
        with pytest.raises(UsageError, match="--buddy-alpha is a share"):
            layer_alphas(wrong, 3)


def test_beta_follows_a_budget_of_bytes() -> None:
    """The least threshold at which the last passes would have stayed within it in the mean."""
    for draw in draws():
        budget, meter = float(draw.integers(0, 60)), None
        meter, past = BandwidthMeter(budget), []
        for _ in range(METER_PASSES + 20):
            num_absent, num_asked = int(draw.integers(0, 8)), 8
            past.append((num_absent / num_asked, 10 * num_absent))
            last = past[-METER_PASSES:]
            candidates = [*sorted({share for share, _ in last}), math.inf]
            wanted = next(
                beta
                for beta in candidates
                if sum(size for share, size in last if share >= beta) <= budget * len(last)
            )
            assert meter.beta(*past[-1]) == wanted


def test_layers_within_a_budget_are_left_alone() -> None:
    profile, _ = profile_of(np.random.default_rng(2), ProfileChoices(), num_layers=1)
    draw = np.random.default_rng(3)
    routing = random_routing(draw, 4, profile.num_experts, 2)
    facts = routed_facts(routing, np.arange(profile.num_experts) < 2)
    free = {"tae": "off", "rho": "none", "alpha": "1", "max_mass": "off"}
    for num_bytes, is_left_alone in ((0, False), (10**6, True)):
        inputs = inputs_of(profile, beta_bytes=str(num_bytes), **free)
        policies = CATALOGUE["buddymoe"].policies_without_device(inputs)
        assert (policies.substitute(facts) is None) == is_left_alone
        assert policies.receipts is not None
        [receipt] = policies.receipts.all()
        assert receipt.routed_mass == pytest.approx(float(routing.weights.sum()))
    with pytest.raises(UsageError, match="beta_bytes"):
        parse_options("buddymoe", {"beta": "0.5", "beta_bytes": "100"})


def test_only_experts_on_disk_are_replaced_where_asked() -> None:
    """Beside a device: those in host memory are waited for, and count for no gate."""
    lists = np.array([[0]] * 4, np.int32)
    routing = RoutedTokens(np.array([[1, 2], [2, 3]]), np.full((2, 2), 0.5, np.float32))
    here = np.array([True, False, False, False])
    at_host = np.array([False, True, True, False])

    def ran(only_disk: bool, has_device: bool, is_at_host: NDArray[np.bool_] | None) -> list[int]:
        facts = routed_facts(routing, here, has_device=has_device)._replace(is_at_host=is_at_host)
        policy = Buddies([LayerRules(0, lists, 2, 0)], PLAIN, only_disk=only_disk)
        answer = policy.counted(facts, Receipts(1).account(facts, routing))
        return sorted({*(routing if answer is None else answer).experts.ravel().tolist()})

    assert ran(False, True, at_host) == [0, 2, 3]
    assert ran(True, True, at_host) == [0, 1, 2], "3 alone is on disk"
    assert ran(True, True, None) == [1, 2, 3], "everything is in host memory"
    assert ran(True, False, None) == [0, 2, 3], "without a device what is absent is on disk"


def test_the_receipt_says_how_many_partitions_were_crossed() -> None:
    profile, _ = profile_of(np.random.default_rng(4), ProfileChoices(), num_layers=1)
    draw, total = np.random.default_rng(5), {}
    for parts in ("1", "2"):
        inputs = inputs_of(profile, partitions=parts, tae="off", beta="off", max_mass="off")
        policies = CATALOGUE["buddymoe"].policies_without_device(inputs)
        for _ in range(10):
            routing = random_routing(draw, 4, profile.num_experts, 2)
            policies.substitute(routed_facts(routing, draw.random(profile.num_experts) < 0.5))
        assert policies.receipts is not None
        [receipt] = policies.receipts.all()
        total[parts] = receipt.num_hops
        assert receipt.num_substituted and receipt.as_dict()["num_hops"] == receipt.num_hops
    assert total["1"] == 0 < total["2"]


def test_a_profile_with_choices_that_cannot_be_is_refused() -> None:
    profile, _ = profile_of(np.random.default_rng(6), ProfileChoices(is_weighted=True))
    assert profile.weighted is not None
    for changes in (
        {"temperature": 0.0},
        {"temperature": math.nan},
        {"alphas": np.array([0.5])},
        {"alphas": np.array([0.5, 0.0])},
        {"weighted": profile.weighted + (1 << 25)},
        {"weighted": profile.weighted[:1]},
    ):
        with pytest.raises(UsageError):
            replace(profile, **changes)
