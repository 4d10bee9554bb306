"""Cases for tests of substitution: routings, residents and buddies, drawn from a seed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from lowtide.buddies import LayerRules, Masses, PassAccount
from lowtide.core import (
    BoolArray,
    Costs,
    Demand,
    Facts,
    IntArray,
    PassRows,
    RoutedTokens,
    RowKind,
    Step,
    StepKind,
    WeightArray,
)
from lowtide.policies import catalogue
from lowtide.policies.buddy_profile import BuddyProfile
from lowtide.policies.catalogue import CATALOGUE
from lowtide.policies.plain_buddies import PlainBuddies
from lowtide.policies.recipe import PolicyInputs
from lowtide.policies.substitution import CountedSubstitution

UNBOUNDED = 1 << 30
PLAIN = PlainBuddies()


def account(num_rows: int, num_layers: int = 1) -> PassAccount:
    """Of one owner that nothing bounds, counted in plain Python."""
    return PLAIN.of_pass(np.zeros(num_rows, np.int64), Masses([0.0], [0.0]), num_layers, None)


def random_routing(
    draw: np.random.Generator, num_tokens: int, num_experts: int, k: int, levels: int = 0
) -> RoutedTokens:
    """levels: so many different weights at most, so that ties come; 0: none does."""
    rank = draw.random((num_tokens, num_experts))
    experts = np.sort(np.argsort(rank, axis=1)[:, :k], axis=1)
    weights = draw.random((num_tokens, k)).astype(np.float32) + np.float32(0.01)
    if levels:
        weights = np.ceil(weights * levels).astype(np.float32) / levels
    return RoutedTokens(experts, weights)


def random_lists(
    draw: np.random.Generator, num_lists: int, num_experts: int, length: int
) -> IntArray:
    """Of every list a prefix of a permutation, -1 behind its end; nobody is in his own."""
    lists = np.full((num_lists, length), -1, np.int32)
    for i in range(num_lists):
        others = draw.permutation(np.setdiff1d(np.arange(num_experts), [i]))[:length]
        others = others[: draw.integers(0, len(others) + 1)]
        lists[i, : len(others)] = others
    return lists


def random_search(draw: np.random.Generator, num_tokens: int = 50) -> tuple[LayerRules, Facts]:
    """Of any size else; some experts may be on their way."""
    num_experts = int(draw.integers(2, 20))
    k = int(draw.integers(1, min(8, num_experts) + 1))
    routing = random_routing(draw, num_tokens, num_experts, k, int(draw.integers(0, 4)))
    lists = random_lists(draw, num_experts, num_experts, int(draw.integers(1, 9)))
    facts = routed_facts(routing, draw.random(num_experts) < draw.random())
    rho = int(draw.choice([0, 1, 2, 3, UNBOUNDED]))
    return LayerRules(0, lists, rho, 0), arriving(facts, draw.random(num_experts) < 0.1)


def arriving(facts: Facts, is_coming: BoolArray) -> Facts:
    """is_coming [num_experts]."""
    return facts._replace(arriving_s=np.where(is_coming[facts.demand.experts], 1.0, np.inf))


def edge_searches() -> Iterator[tuple[LayerRules, Facts]]:
    """Yield the searches at the edges, which a test of drawn cases leaves out.

    One expert in all, one for each token, all of them chosen; no resident, all resident; weights
    alike, zero or huge; `rho` above k; empty lists.
    """
    draw = np.random.default_rng(11)
    for num_experts, k in ((1, 1), (2, 1), (2, 2), (5, 1), (5, 3), (8, 8), (9, 4)):
        ids = np.sort(np.argsort(draw.random((3, num_experts)), axis=1)[:, :k], axis=1)
        for weights, here in itertools.product(_edge_weights(draw, 3, k), (0.0, 0.5, 1.0)):
            facts = routed_facts(RoutedTokens(ids, weights), draw.random(num_experts) < here)
            for length, rho in ((1, k + 1), (8, UNBOUNDED), (8, 1)):
                yield (
                    LayerRules(0, random_lists(draw, num_experts, num_experts, length), rho, 0),
                    facts,
                )


def _edge_weights(draw: np.random.Generator, num_tokens: int, k: int) -> Iterator[WeightArray]:
    """[num_tokens, k] each."""
    some = draw.random((num_tokens, k)).astype(np.float32)
    yield np.full_like(some, 0.5)
    yield np.zeros_like(some)
    yield draw.choice(np.array([0.0, -0.0, 1e-45, 3e38, -1.0], np.float32), some.shape)


def slow_search(rules: LayerRules, facts: Facts) -> IntArray:
    """Run Algorithm 1 from its text, without anything of ours.

    Returns ids in the places of the experts that they stand in for, [tokens, k].
    """
    assert facts.routing is not None and facts.is_here is not None
    experts, weights, _ = facts.routing
    out, due = experts.copy(), facts.arriving_s
    coming = set(() if due is None else facts.demand.experts[np.isfinite(due)].tolist())
    for t in range(len(out)):
        used = set(experts[t].tolist())
        weight = [float(each) for each in weights[t]]
        by_rank = sorted(range(out.shape[1]), key=lambda place: (-weight[place], place))
        spent = 0
        for place in by_rank:
            own = int(experts[t, place])
            if facts.is_here[own] or own in coming or spent >= rules.rho:
                continue
            for buddy in rules.lists[own]:
                if buddy >= 0 and facts.is_here[buddy] and int(buddy) not in used:
                    out[t, place] = buddy
                    used.add(int(buddy))
                    spent += 1
                    break
    return out


def slow_late(rules: LayerRules, facts: Facts, num_in_time: int, share: float | None) -> IntArray:
    """Run `miss=late` without a device from docs/policies.md, without anything of ours.

    The absent experts of least router weight are given up until no more are left than are read in
    time, each by all of its tokens or by none. One owner's tokens, of whose weight `share` may be
    moved. Returns ids in the places of the experts that they stand in for, [tokens, k].
    """
    assert facts.routing is not None and facts.is_here is not None
    experts, weights, _ = facts.routing
    out, places = experts.copy(), dict[int, list[tuple[int, int]]]()
    for token, place in np.ndindex(*experts.shape):
        if not facts.is_here[experts[token, place]]:
            places.setdefault(int(experts[token, place]), []).append((token, place))
    mass = {own: sum(float(weights[at]) for at in of) for own, of in places.items()}
    left = np.inf if share is None else share * float(weights.sum(dtype=np.float64))
    num_late = len(places) - num_in_time
    for own in sorted(places, key=lambda own: (mass[own], own)):
        found = {}
        for token, place in places[own]:
            used = {*experts[token].tolist(), *out[token].tolist()}
            here = (b for b in rules.lists[own].tolist() if b >= 0 and facts.is_here[b])
            buddy = next((b for b in here if b not in used), None)
            if buddy is not None and (out[token] != experts[token]).sum() < rules.rho:
                found[token, place] = buddy
        if num_late > 0 and len(found) == len(places[own]) and mass[own] <= left:
            for at, buddy in found.items():
                out[at] = buddy
            num_late, left = num_late - 1, left - mass[own]
    return out


def routed_facts(
    routing: RoutedTokens,
    is_here: BoolArray,
    *,
    layer: int = 0,
    num_layers: int = 1,
    kind: RowKind = RowKind.DECODE,
    requests: IntArray | None = None,
    costs: Costs | None = None,
    has_device: bool = False,
) -> Facts:
    """Of a layer that chose `routing`, with those residents; its rows are all of one kind."""
    num_rows, num_experts = len(routing.weights), len(is_here)
    num_tokens = np.bincount(routing.experts.ravel(), minlength=num_experts)
    experts = num_tokens.nonzero()[0]
    requests = np.zeros(num_rows, np.int64) if requests is None else requests
    rows = PassRows(requests, np.full(num_rows, kind, np.uint8))
    return Facts(
        Step(StepKind.DECODE, 0, rows),
        layer,
        Demand(experts, num_tokens[experts], is_here[experts]),
        is_here,
        np.full(num_layers, int(is_here.sum())),
        Costs.unknown(10) if costs is None else costs,
        can_fetch=has_device,
        has_idle_link=has_device,
        routing=routing,
        is_here=is_here,
    )


def random_profile(num_layers: int, num_experts: int, k: int, seed: int = 0) -> BuddyProfile:
    """Of a router that chooses anybody."""
    draw, num_tokens = np.random.default_rng(seed), 40 * num_experts
    together = np.zeros((num_layers, num_experts, num_experts), np.int64)
    activations = np.zeros((num_layers, num_experts), np.int64)
    sample = []
    for layer in range(num_layers):
        routing = random_routing(draw, num_tokens, num_experts, k)
        chosen = np.zeros((num_tokens, num_experts), np.int64)
        np.put_along_axis(chosen, routing.experts, 1, axis=1)
        together[layer] = chosen.T @ chosen
        activations[layer] = np.diagonal(together[layer])
        np.fill_diagonal(together[layer], 0)
        weights = -np.sort(-routing.weights, axis=1)
        sample.append(weights / weights.sum(axis=1, keepdims=True))
    return BuddyProfile(
        "f" * 64,
        num_tokens,
        activations,
        together,
        np.stack(sample).astype(np.float32),
    )


class Seen(CountedSubstitution):
    """A substitution that keeps what it was asked and answered."""

    def __init__(self, inner: CountedSubstitution) -> None:
        self._inner = inner
        self.asked: list[tuple[Facts, RoutedTokens | None]] = []

    def counted(self, facts: Facts, account: PassAccount) -> RoutedTokens | None:
        answer = self._inner.counted(facts, account)
        self.asked.append((facts, answer))
        return answer


@contextmanager
def profiled(make: type[Seen] = Seen) -> Iterator[list[Seen]]:
    """`buddymoe` with a profile of chance, and what its substitutions did; make: what sees them."""
    plain, seen = CATALOGUE["buddymoe"], []

    def having(setting: PolicyInputs) -> PolicyInputs:
        profile = random_profile(setting.num_layers, setting.num_experts, 2)
        return replace(setting, buddies=profile)

    def substitution(setting: PolicyInputs) -> Seen | None:
        assert plain.substitution is not None
        made = plain.substitution(having(setting))
        if made is None:
            return None
        assert isinstance(made, CountedSubstitution)
        seen.append(make(made))
        return seen[-1]

    there = replace(plain, substitution=substitution, check_buddies=lambda options, profile: None)
    catalogue.CATALOGUE["buddymoe"] = there
    try:
        yield seen
    finally:
        catalogue.CATALOGUE["buddymoe"] = plain
