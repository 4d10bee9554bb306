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
from numpy.typing import NDArray

from lowtide.errors import UsageError
from lowtide.policies.buddy_lists import BuddyRule, Ranking, fitted_alphas, lists_of
from lowtide.policies.buddy_profile import BuddyProfile, QualityCurve, token_entropy


def one_expert(shares: list[float]) -> NDArray[np.float64]:
    """q of a layer whose expert 0 has these shares with 1, 2, ...; the others have even ones."""
    num = len(shares) + 1
    q = np.full((1, num, num), 1 / (num - 1))
    q[0, 0, 1:] = shares
    return q * ~np.eye(num, dtype=bool)


@pytest.mark.parametrize(
    "alpha, ids",
    [(0.3, [2]), (0.4, [2]), (0.5, [2, 4]), (0.7, [2, 4]), (0.75, [2, 4, 1]), (1.0, [2, 4, 1, 3])],
)
def test_prefixes_by_hand(alpha: float, ids: list[int]) -> None:
    """Eq. 5: the fewest of the best peers whose shares sum to alpha at least."""
    lists = lists_of(one_expert([0.2, 0.4, 0.1, 0.3]), BuddyRule(alpha, k_max=4))
    assert lists.ids[0, 0].tolist() == ids + [-1] * (4 - len(ids))
    assert lists.lengths[0, 0] == len(ids)
    shares = [0, 0.2, 0.4, 0.1, 0.3]
    np.testing.assert_allclose(lists.q[0, 0, : len(ids)], [shares[j] for j in ids])
    assert not lists.q[0, 0, len(ids) :].any()


def test_ties_go_to_the_lower_id_and_the_cap_cuts() -> None:
    lists = lists_of(one_expert([0.25] * 4), BuddyRule(1.0, k_max=3))
    assert lists.ids[0, 0].tolist() == [1, 2, 3] and lists.lengths[0].tolist() == [3] * 5
    assert lists_of(one_expert([0.25] * 4), BuddyRule(1.0, k_max=9)).ids.shape == (1, 5, 4)


def test_a_similarity_sorts_the_prefix_before_the_cap() -> None:
    q = one_expert([0.2, 0.4, 0.1, 0.3])
    similarity = np.tile(np.array([1.0, 0.9, 0.1, 0.99, -0.5], np.float32), (1, 5, 1))
    lists = lists_of(q, BuddyRule(0.75, k_max=2, ranking=Ranking.OUTPUTS), similarity)
    assert lists.ids[0, 0].tolist() == [1, 2]  # of 2, 4 and 1; 3 is most alike and no buddy
    np.testing.assert_allclose(lists.q[0, 0], [0.9, 0.1])


def test_each_layer_has_an_alpha_of_its_own() -> None:
    q = np.concatenate([one_expert([0.2, 0.4, 0.1, 0.3])] * 2)
    lists = lists_of(q, BuddyRule((0.3, 1.0), k_max=4))
    assert lists.lengths[:, 0].tolist() == [1, 4] and lists.alphas.tolist() == [0.3, 1.0]


@examples(60)
@given(
    seed=st.integers(0, 10**6),
    alpha=st.floats(0.01, 1),
    k_max=st.integers(1, 7),
    smoothing=st.sampled_from([0.0, 0.5, 1.0]),
    ranking=st.sampled_from([Ranking.CO_ACTIVATION, Ranking.WEIGHTED]),
)
def test_lists_are_the_shortest_prefixes(
    seed: int, alpha: float, k_max: int, smoothing: float, ranking: Ranking
) -> None:
    profile = direct_profile(random_routing(seed, 2, 8, 3, 12), 8)
    lists = profile.lists(BuddyRule(alpha, k_max, ranking, smoothing))
    q = profile.q(ranking, smoothing)
    for layer, expert in np.ndindex(2, 8):
        if not profile.activations[layer, expert]:
            assert lists.lengths[layer, expert] == 0 and (lists.ids[layer, expert] == -1).all()
            continue
        ranked = sorted(set(range(8)) - {expert}, key=lambda j: (-q[layer, expert, j], j))
        covered, wanted = 0.0, []
        for peer in ranked:
            wanted.append(peer)
            covered += q[layer, expert, peer]
            if covered >= alpha - 1e-12:
                break
        found = lists.ids[layer, expert, : lists.lengths[layer, expert]].tolist()
        assert found == wanted[:k_max]


@examples(40)
@given(seed=st.integers(0, 10**6), size=st.floats(1, 7))
def test_fitted_lists_are_as_long_as_they_may_be(seed: int, size: float) -> None:
    profile = direct_profile(random_routing(seed, 2, 8, 3, 30), 8)
    rule = profile.fitted_to(size, BuddyRule(k_max=7))
    is_active = profile.activations > 0
    lengths = profile.lists(rule).lengths
    assert isinstance(rule.alpha, tuple)
    for layer in range(2):
        longest = max(1.0, float(lengths[layer][is_active[layer]].mean()))
        assert longest <= size + 1e-9 or longest == 1
        above = [min(1.0, alpha + 1e-6) for alpha in rule.alpha]
        more = profile.lists(dataclasses.replace(rule, alpha=tuple(above))).lengths
        assert rule.alpha[layer] == 1 or more[layer][is_active[layer]].mean() > size - 1e-9


def test_what_no_list_can_be_made_by_is_refused() -> None:
    profile = direct_profile(random_routing(0, 2, 8, 3, 12), 8)
    for alpha in (0.0, -0.5, 1.01, float("nan"), (0.5, 0.0)):
        with pytest.raises(UsageError, match="above 0 and at most 1"):
            profile.lists(BuddyRule(alpha))
    with pytest.raises(UsageError, match="3 values and the model 2"):
        profile.lists(BuddyRule((0.5, 0.5, 0.5)))
    with pytest.raises(UsageError, match="k_max"):
        profile.lists(BuddyRule(k_max=0))
    with pytest.raises(UsageError, match="smoothing"):
        profile.lists(BuddyRule(smoothing=-1.0))
    with pytest.raises(UsageError, match="cannot rank by outputs"):
        profile.lists(BuddyRule(ranking=Ranking.OUTPUTS))
    for size in (0.5, 8, float("nan")):
        with pytest.raises(UsageError, match="from 1 to 7"):
            fitted_alphas(profile.q(), size)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"num_tokens": 11}, "contradict"),
        ({"together": np.zeros((2, 8, 8), np.int64)}, "contradict"),
        ({"together_weight": np.full((2, 8, 8), np.nan, np.float32)}, "contradict"),
        ({"together_weight": np.full((2, 8, 8), 100.0, np.float32)}, "contradict"),
        ({"activations": np.zeros((2, 8), np.int64)}, "layer 0 .* no activity"),
        ({"activations": np.zeros((2, 9), np.int64)}, "activations"),
        ({"output_similarity": np.zeros((2, 8, 7), np.float32)}, "output_similarity"),
        ({"sample": np.ones((2, 4, 1), np.float32)}, "chooses 1"),
        ({"sample": np.ones((2, 0, 3), np.float32)}, "sample"),
        ({"together": np.zeros((2, 2, 2), np.int64)}, "2 experts"),
        ({"rule": BuddyRule(0.0)}, "alpha"),
        ({"rule": BuddyRule(ranking=Ranking.WEIGHTS)}, "cannot rank by weights"),
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
    # At temperature 2: sqrt(p), summing to 1.
    assert token_entropy(p, 2.0) == pytest.approx(token_entropy(np.sqrt(p)))
    assert token_entropy(p, 0.5) < token_entropy(p) < token_entropy(p, 2.0)
    with pytest.raises(UsageError, match="temperature"):
        token_entropy(p, 0.0)


def test_thresholds_are_percentiles_of_each_layer() -> None:
    profile = direct_profile(random_routing(3, 2, 8, 3, 200), 8)
    for percentile in (0, 15, 100):
        limits = profile.entropy_threshold(percentile, 0.8)
        shares = (token_entropy(profile.sample, 0.8) <= limits[:, None]).mean(axis=1)
        np.testing.assert_allclose(shares, max(percentile, 0.5) / 100, atol=0.006)
    with pytest.raises(UsageError, match="percentile"):
        profile.entropy_threshold(101)


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
    assert curve.kl_of(0.15) == pytest.approx(0.02) and curve.kl_of(0.5) == float("inf")


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
    assert curve.kl_of(curve.max_mass(max_kl)) <= max_kl + 1e-9
