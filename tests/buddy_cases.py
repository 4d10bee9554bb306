"""Cases for tests of miss policies: routings, residents and buddies, drawn from a seed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

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
from lowtide.policies.buddy_lists import BuddyLists, lists_of
from lowtide.policies.buddy_lists import BuddyRule as Rule
from lowtide.policies.buddy_profile import BuddyProfile
from lowtide.policies.buddy_search import UNBOUNDED, BuddySearch


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


def random_search(draw: np.random.Generator, num_tokens: int = 50) -> BuddySearch:
    """Of any size else, with or without lists of each pair's own."""
    num_experts = int(draw.integers(2, 20))
    k = int(draw.integers(1, min(8, num_experts) + 1))
    length = int(draw.integers(1, 9))
    routing = random_routing(draw, num_tokens, num_experts, k, int(draw.integers(0, 4)))
    list_of, num_lists = None, num_experts
    if draw.random() < 0.3:
        num_lists = num_tokens * k
        list_of = np.arange(num_lists).reshape(num_tokens, k)
    is_here = draw.random(num_experts) < draw.random()
    may = ~is_here[routing.experts] & (draw.random((num_tokens, k)) < 0.9)
    return BuddySearch(
        routing.experts,
        routing.weights,
        may,
        random_lists(draw, num_lists, num_experts, length),
        list_of,
        is_here,
        int(draw.choice([1, 2, length, UNBOUNDED])),
        int(draw.choice([0, 1, 2, 3, UNBOUNDED])),
    )


def small_searches() -> Iterator[BuddySearch]:
    """All of one token with two of four experts, with every set of residents."""
    lists = np.array([[1, 2, 3], [0, 3, -1], [3, -1, -1], [2, 1, 0]], np.int32)
    for experts in itertools.combinations(range(4), 2):
        for weights, here in itertools.product(
            [(0.3, 0.7), (0.7, 0.3), (0.5, 0.5)], itertools.product([False, True], repeat=4)
        ):
            is_here = np.array(here)
            for may, rank, rho in itertools.product(
                itertools.product([False, True], repeat=2), (1, 2, 3), (0, 1, 2)
            ):
                chosen = np.array([experts])
                yield BuddySearch(
                    chosen,
                    np.array([weights], np.float32),
                    np.array([may]) & ~is_here[chosen],
                    lists,
                    None,
                    is_here,
                    rank,
                    rho,
                )


def edge_searches() -> Iterator[BuddySearch]:
    """What a test of the middle leaves out: one expert in all, one for each token, all of them
    chosen, nobody here, everybody, all weights alike or none of them a number, `rho` above k, H
    beyond the list, lists of nobody."""
    draw = np.random.default_rng(11)
    for num_experts, k in ((1, 1), (2, 1), (2, 2), (5, 1), (5, 3), (8, 8), (9, 4)):
        ids = np.sort(np.argsort(draw.random((3, num_experts)), axis=1)[:, :k], axis=1)
        for weights, here in itertools.product(_edge_weights(draw, 3, k), (0.0, 0.5, 1.0)):
            is_here = draw.random(num_experts) < here
            for length, rank, rho in ((1, 1, k + 1), (8, 9, UNBOUNDED), (8, UNBOUNDED, 1)):
                yield BuddySearch(
                    ids,
                    weights,
                    ~is_here[ids],
                    random_lists(draw, num_experts, num_experts, length),
                    None,
                    is_here,
                    rank,
                    rho,
                )


def _edge_weights(draw: np.random.Generator, num_tokens: int, k: int) -> Iterator[WeightArray]:
    """[num_tokens, k] each"""
    some = draw.random((num_tokens, k)).astype(np.float32)
    yield np.full_like(some, 0.5)
    yield np.zeros_like(some)
    yield np.full_like(some, np.nan)
    is_odd = draw.random(some.shape) < 0.5
    for values in ([np.nan], [np.inf], [-np.inf, np.nan], [0.0, -0.0], [1e-45, 3e38, -1.0]):
        odd = draw.choice(np.array(values, np.float32), some.shape)
        yield np.where(is_odd, odd, some)


def slow_search(search: BuddySearch) -> IntArray:
    """Algorithm 1 once more, from its text and without anything of ours; a weight that is no number
    ranks last."""
    out = search.experts.copy()
    for t in range(len(out)):
        used = set(search.experts[t].tolist())
        weight = [float(each) for each in search.weights[t]]
        by_rank = sorted(
            range(out.shape[1]),
            key=lambda p: (True, 0.0, p) if np.isnan(weight[p]) else (False, -weight[p], p),
        )
        spent = 0
        for place in by_rank:
            if not search.may[t, place] or spent >= search.rho:
                continue
            number = (
                search.experts[t, place] if search.list_of is None else search.list_of[t, place]
            )
            for buddy in search.lists[number][: search.search_rank]:
                if buddy >= 0 and search.is_here[buddy] and int(buddy) not in used:
                    out[t, place] = buddy
                    used.add(int(buddy))
                    spent += 1
                    break
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
        (0.1 * together).astype(np.float32),
        np.stack(sample).astype(np.float32),
    )


def random_buddies(num_layers: int, num_experts: int, seed: int = 0) -> BuddyLists:
    """Lists of any lengths."""
    draw = np.random.default_rng(seed)
    q = draw.random((num_layers, num_experts, num_experts))
    for of_layer in q:
        np.fill_diagonal(of_layer, 0)
    return lists_of(q / q.sum(axis=2, keepdims=True), Rule(alpha=0.7, k_max=8))
