"""Algorithm 1: its plain and Triton twins say the same as the paper's text.

The compiled one is part of a layer's whole decision: `test_buddy_twins.py`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from buddy_cases import edge_searches, random_search, slow_search, small_searches
from examples import scaled

from lowtide.policies.buddy_search import UNBOUNDED, BuddySearch, search_buddies

NUM_RANDOM = 10_000  # tokens
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="this torch has no Triton"
)


def test_every_small_case() -> None:
    num_found = 0
    for search in small_searches():
        wanted = slow_search(search)
        assert np.array_equal(search_buddies(search), wanted), search
        num_found += int((wanted != search.experts).sum())
    assert num_found > 500


def test_random_cases() -> None:
    draw, num_found = np.random.default_rng(0), 0
    for _ in range(scaled(NUM_RANDOM) // 50):
        search = random_search(draw)
        wanted = slow_search(search)
        assert np.array_equal(search_buddies(search), wanted), search
        check(search, wanted)
        num_found += int((wanted != search.experts).sum())
    assert num_found > scaled(NUM_RANDOM) // 10


def test_cases_at_the_edge() -> None:
    for search in edge_searches():
        wanted = slow_search(search)
        assert np.array_equal(search_buddies(search), wanted), search
        check(search, wanted)


def check(search: BuddySearch, found: np.ndarray) -> None:
    """What holds of every answer, whoever computed it."""
    is_moved = found != search.experts
    assert (is_moved.sum(axis=1) <= search.rho).all()
    assert search.may[is_moved].all() and search.is_here[found[is_moved]].all()
    for row, own in zip(found, search.experts, strict=True):
        assert len(set(row.tolist())) == len(row)
        stood_in = set(row.tolist()) - set(own.tolist())
        assert len(stood_in) == int((row != own).sum())


def test_a_worked_example() -> None:
    """Ranks are 4 (0.5), 1 (0.3), 7 (0.2); 4 and 7 are absent and 2 is the first of both."""
    search = BuddySearch(
        np.array([[1, 4, 7]]),
        np.array([[0.3, 0.5, 0.2]], np.float32),
        np.array([[False, True, True]]),
        np.array([[-1, -1]] * 4 + [[1, 2]] + [[-1, -1]] * 2 + [[2, 3]], np.int32),
        None,
        np.array([False, True, True, True, False, False, False, False]),
        2,
        UNBOUNDED,
    )
    assert search_buddies(search).tolist() == [[1, 2, 3]]
    assert search_buddies(search._replace(rho=1)).tolist() == [[1, 2, 7]]
    assert search_buddies(search._replace(rho=0)).tolist() == [[1, 4, 7]]
    # Only the first of a list is looked at: 1 is the token's own, and 2 is free for 7.
    assert search_buddies(search._replace(search_rank=1)).tolist() == [[1, 4, 2]]
    ties = search._replace(weights=np.full((1, 3), 0.5, np.float32), rho=1)
    assert search_buddies(ties).tolist() == [[1, 2, 7]]


def as_triton(search: BuddySearch, device: str) -> np.ndarray:
    from lowtide.kernels.triton_buddies import find_buddies

    there = [torch.from_numpy(a).to(device) if isinstance(a, np.ndarray) else a for a in search]
    return find_buddies(*there).cpu().numpy()


def many_small() -> Iterator[BuddySearch]:
    """The small cases, those alike in all but their tokens as one, no token of them twice: who is
    resident is never replaced, whatever a case says of it."""
    groups: dict[tuple[Any, ...], list[BuddySearch]] = {}
    for search in small_searches():
        key = (*search.is_here.tolist(), search.search_rank, search.rho)
        groups.setdefault(key, []).append(search)
    for group in groups.values():
        tokens = [np.concatenate([g[i] for g in group]) for i in range(3)]
        _, first = np.unique(np.hstack(tokens), axis=0, return_index=True)
        experts, weights, may = (part[first] for part in tokens)
        yield group[0]._replace(experts=experts, weights=weights, may=may)


@needs_triton
def test_triton_in_the_interpreter() -> None:
    draw = np.random.default_rng(7)
    few = [random_search(draw, num_tokens=1) for _ in range(scaled(20))]
    for search in [*few, *(s._replace(**first_tokens(s)) for s in list(many_small())[70::20])]:
        assert np.array_equal(as_triton(search, "cpu"), search_buddies(search)), search


@needs_triton
def test_triton_in_the_interpreter_at_the_edge() -> None:
    """A token of every fifth case, which has all kinds of them in it."""
    for number, search in list(enumerate(edge_searches()))[::5]:
        one = slice(number % 3, number % 3 + 1)
        parts = {name: getattr(search, name)[one] for name in ("experts", "weights", "may")}
        search = search._replace(**parts)
        assert np.array_equal(as_triton(search, "cpu"), slow_search(search)), search


@needs_triton
@pytest.mark.slow
def test_triton_in_the_interpreter_in_every_case() -> None:
    """Every small case, as on a GPU, and a tenth of the drawn ones: a token takes some 20 ms."""
    check_all("cpu", NUM_RANDOM // 10)


def first_tokens(search: BuddySearch) -> dict[str, Any]:
    return {name: getattr(search, name)[10:13] for name in ("experts", "weights", "may")}


@needs_triton
@pytest.mark.gpu
def test_triton_on_a_gpu() -> None:
    check_all("cuda", NUM_RANDOM)


def check_all(device: str, num_random: int) -> None:
    """Every small case, every one at the edge and many drawn ones."""
    draw = np.random.default_rng(3)
    cases = [random_search(draw) for _ in range(scaled(num_random) // 50)]
    for search in [*many_small(), *edge_searches(), *cases]:
        assert np.array_equal(as_triton(search, device), search_buddies(search)), search
