"""Buddy lists are the paper's prefixes, and a profile that cannot be is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from buddy_counts import direct_profile, random_routing
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import UsageError
from lowtide.policies.buddy_profile import BuddyProfile, QualityCurve, token_entropy


def one_expert(counts: list[int]) -> BuddyProfile:
    """Expert 0 was chosen so many times with 1, 2, ...; smoothing adds one to each."""
    num = len(counts) + 1
    pairs = [[0, j] for j, count in enumerate(counts, 1) for _ in range(count)]
    return direct_profile([(np.array(pairs), np.ones((len(pairs), 2), np.float32))], num)


@pytest.mark.parametrize(
    "alpha, ids",
    [(0.3, [2]), (0.4, [2]), (0.5, [2, 4]), (0.7, [2, 4]), (0.75, [2, 4, 1]), (1.0, [2, 4, 1, 3])],
)
def test_prefixes_by_hand(alpha: float, ids: list[int]) -> None:
    """Eq. 5: the fewest of the best peers whose shares sum to alpha at least."""
    profile = one_expert([19, 39, 9, 29])  # shares of 0.2, 0.4, 0.1 and 0.3
    np.testing.assert_allclose(profile.q()[0, 0], [0, 0.2, 0.4, 0.1, 0.3])
    assert profile.lists(alpha, 4)[0, 0].tolist() == ids + [-1] * (4 - len(ids))
    assert profile.peers_that_cover(alpha)[0, 0] == len(ids)


def test_ties_go_to_the_lower_id_and_the_cap_cuts() -> None:
    profile = one_expert([5] * 4)
    assert profile.lists(1.0, 3)[0, 0].tolist() == [1, 2, 3]
    assert profile.lists(1.0, 9).shape == (1, 5, 4)


@examples(60)
@given(seed=st.integers(0, 10**6), alpha=st.floats(0.01, 1), k_max=st.integers(1, 7))
def test_lists_are_the_shortest_prefixes(seed: int, alpha: float, k_max: int) -> None:
    profile = direct_profile(random_routing(seed, 2, 8, 3, 12), 8)
    lists, q = profile.lists(alpha, k_max), profile.q()
    for layer, expert in np.ndindex(2, 8):
        if not profile.activations[layer, expert]:
            assert (lists[layer, expert] == -1).all()
            continue
        ranked = sorted(set(range(8)) - {expert}, key=lambda j: (-q[layer, expert, j], j))
        covered, wanted = 0.0, []
        for peer in ranked:
            wanted.append(peer)
            covered += q[layer, expert, peer]
            if covered >= alpha - 1e-12:
                break
        found = [peer for peer in lists[layer, expert].tolist() if peer >= 0]
        assert found == wanted[:k_max]


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"num_tokens": 11}, "contradict"),
        ({"together": np.zeros((2, 8, 8), np.int64)}, "contradict"),
        ({"activations": np.zeros((2, 8), np.int64)}, "layer 0 .* no activity"),
        ({"activations": np.zeros((2, 9), np.int64)}, "activations"),
        ({"sample": np.ones((2, 4, 1), np.float32)}, "chooses 1"),
        ({"sample": np.ones((2, 0, 3), np.float32)}, "sample"),
        ({"together": np.zeros((2, 2, 2), np.int64)}, "2 experts"),
    ],
    ids=str,
)
def test_a_profile_that_cannot_be_is_refused(changes: dict[str, Any], reason: str) -> None:
    profile = direct_profile(random_routing(0, 2, 8, 3, 12), 8)
    with pytest.raises(UsageError, match=reason):
        dataclasses.replace(profile, **changes)


def test_entropy_by_hand() -> None:
    even, all_on_one = np.full(4, 0.25), np.array([1.0, 0, 0, 0])
    assert token_entropy(even) == pytest.approx(1.0)
    assert token_entropy(all_on_one) == 0.0 and token_entropy(np.ones((3, 1))).tolist() == [0] * 3
    p = np.array([0.5, 0.25, 0.25])
    wanted = (0.5 * np.log(2) + 0.5 * np.log(4)) / np.log(3)
    assert token_entropy(7 * p) == pytest.approx(wanted)  # of whatever sum


def test_thresholds_are_percentiles_of_each_layer() -> None:
    profile = direct_profile(random_routing(3, 2, 8, 3, 200), 8)
    for percentile in (0, 15, 100):
        limits = profile.entropy_threshold(percentile)
        shares = (token_entropy(profile.sample) <= limits[:, None]).mean(axis=1)
        np.testing.assert_allclose(shares, max(percentile, 0.5) / 100, atol=0.006)


def pairs_profile(pairs: list[list[int]]) -> BuddyProfile:
    ids = np.array(pairs)
    return direct_profile([(ids, np.ones(ids.shape, np.float32))], 6)


def test_concentration_by_hand() -> None:
    fixed = pairs_profile([[0, 1], [2, 3], [4, 5]])  # each expert has one peer
    all_pairs = pairs_profile([[i, j] for i in range(6) for j in range(i + 1, 6)])
    assert fixed.concentration() == pytest.approx([1.0])
    assert all_pairs.concentration() == pytest.approx([0.0])
    assert fixed.affinity() == pytest.approx([np.log(5)])  # five peers of even popularity
    assert all_pairs.affinity() == pytest.approx([0.0], abs=1e-12)


def test_the_foremost_peers_by_hand() -> None:
    """In pairs of two one peer has all; with all pairs alike four of five peers."""
    every = [[i, j] for i in range(6) for j in range(i + 1, 6)]
    for pairs, share in (([[0, 1], [2, 3], [4, 5]], 1.0), (every, 0.8)):
        assert pairs_profile(pairs).top_peers(4) == pytest.approx([share])


def test_a_popular_expert_is_concentration_without_affinity() -> None:
    """Everybody's peer is expert 0: the lists are short, and they say nothing of likeness."""
    star = pairs_profile([[0, j] for j in range(1, 6)] * 4)
    assert star.concentration()[0] > 0.4
    assert star.affinity()[0] < fixed_affinity() / 2


def fixed_affinity() -> float:
    return float(pairs_profile([[0, 1], [2, 3], [4, 5]]).affinity()[0])


def test_the_curve_by_hand() -> None:
    curve = QualityCurve(np.array([0.1, 0.2, 0.4]), np.array([0.02, 0.01, 0.1]), "00")
    assert curve.max_mass(0.01) == pytest.approx(0.05)
    assert curve.max_mass(0.02) == pytest.approx(0.2)  # a dip counts as high as what is before it
    assert curve.max_mass(0.06) == pytest.approx(0.3)
    assert curve.max_mass(5.0) == pytest.approx(0.4)  # not beyond what was measured
    assert curve.max_mass(0.0) == 0.0
    for wrong in (-0.1, float("nan")):
        with pytest.raises(UsageError, match="at least 0"):
            curve.max_mass(wrong)


@examples(60)
@given(
    points=st.lists(st.tuples(st.floats(0.01, 0.2), st.floats(0, 0.5)), min_size=1, max_size=6),
    max_kl=st.floats(0, 1),
)
def test_the_mass_of_a_bound_keeps_the_bound(
    points: list[tuple[float, float]], max_kl: float
) -> None:
    steps, kl = zip(*points, strict=True)
    curve = QualityCurve(np.cumsum(steps) / 2, np.array(kl), "00")
    mass = curve.max_mass(max_kl)
    assert 0 <= mass <= curve.mass[-1]
    estimate = np.interp(mass, [0.0, *curve.mass], [0.0, *np.maximum.accumulate(curve.kl)])
    assert estimate <= max_kl + 1e-9
