"""Algorithm 1: its plain twin says the same as the paper's text.

The compiled one is part of a layer's whole decision: `test_buddy_twins.py`.
"""

from __future__ import annotations

import numpy as np
from buddy_cases import edge_searches, random_search, slow_search, small_searches
from examples import scaled

from lowtide.policies.buddy_search import UNBOUNDED, BuddySearch, search_buddies

NUM_RANDOM = 10_000  # tokens


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
