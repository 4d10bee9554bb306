"""The rules of bidirectional models, against the formulas of the code that published them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.decode.remasking import (
    choose_above,
    choose_by_factor,
    choose_surest,
    choose_tempered,
    num_allowed,
    num_by_share,
    written_share,
)

# Few values, so that there are many ties.
confidences = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.9, 1.0]), min_size=1, max_size=40)


def times_of(steps: int, eps: float = 1e-3) -> np.ndarray:
    return torch.linspace(1, eps, steps + 1).double().numpy()


@given(confidences, st.integers(0, 50))
def test_the_surest_come_first_and_of_equals_the_lower_position(values, num_tokens) -> None:
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    chosen = choose_surest(np.array(values), num_tokens)
    assert np.flatnonzero(chosen).tolist() == sorted(order[:num_tokens])


@given(confidences, st.floats(0, 1), st.none() | st.integers(1, 40))
def test_the_threshold_is_that_of_the_published_loop(values, threshold, num_tokens) -> None:
    """Fast-dLLM: the top-k, less those but the first that are below the threshold."""
    confidence = np.array(values)
    num_most = len(values) if num_tokens is None else min(num_tokens, len(values))
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:num_most]
    expected = {i for rank, i in enumerate(order) if rank == 0 or values[i] >= threshold}
    assert set(np.flatnonzero(choose_above(confidence, threshold, num_tokens))) == expected


@given(confidences, st.floats(0, 50))
def test_the_factor_takes_the_most_that_its_bound_allows(values, factor) -> None:
    ordered = sorted(values, reverse=True)
    allowed = [n for n in range(1, len(values) + 1) if ordered[n - 1] >= 1 - factor / (n + 1)]
    num_tokens = max([1, *allowed])
    # What one fails, all less sure ones fail: the bound only rises.
    assert allowed == list(range(1, len(allowed) + 1))
    chosen = choose_by_factor(np.array(values), factor)
    assert chosen.tolist() == choose_surest(np.array(values), num_tokens).tolist()


@given(st.integers(1, 200), st.integers(1, 300), st.sampled_from([1e-3, 1e-5, 0.3]))
def test_the_share_is_that_of_the_published_loop_and_all_is_written(num_tokens, steps, eps) -> None:
    """Dream's arithmetic, tensors and all: float32, rounded down."""
    times = torch.linspace(1, eps, steps + 1)
    num_masked = num_tokens
    for step in range(steps):
        masks = torch.ones(num_masked, dtype=torch.bool)
        t, s = times[step], times[step + 1]
        expected = int(masks.sum() / 1 * (1 - s / t)) if step < steps - 1 else num_masked
        assert num_by_share(num_masked, times_of(steps, eps), step) == expected
        assert float(written_share(times_of(steps, eps), step)) == (
            float(1 - s / t) if step < steps - 1 else 1
        )
        num_masked -= expected
    assert num_masked == 0
    assert num_by_share(7, times_of(steps, eps), steps) == 7  # and ever after


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_steps_bound_the_threshold_as_in_the_published_loop(share, steps, threshold, seed) -> None:
    """Fast-dLLM's loop for Dream, which wants as many tokens in every step."""
    generator = np.random.default_rng(seed)
    num_left, left_over, quota, num_steps = share * steps, 0, share, steps
    num_written = step = 0
    while num_left and step < num_steps:
        confidence = generator.random(num_left)
        most = quota + left_over
        assert num_allowed(share * steps, steps, step, num_written) == max(1, min(most, num_left))
        chosen = choose_above(confidence, threshold, most)
        num_kept = int(min(most, num_left) - chosen.sum())
        if num_kept and step >= num_steps - 1:
            quota, num_steps = 0, num_steps + num_kept
        left_over = num_kept
        num_written += int(chosen.sum())
        num_left -= int(chosen.sum())
        step += 1
    assert num_left == 0


@given(st.integers(1, 60), st.integers(1, 90))
def test_any_number_of_steps_bounds_the_threshold(num_tokens, steps) -> None:
    num_written = 0
    for step in range(steps):
        if num_written < num_tokens:
            allowed = num_allowed(num_tokens, steps, step, num_written)
            assert 1 <= allowed <= num_tokens - num_written
            num_written += allowed
    assert num_written == num_tokens


def test_tempered_choices_are_drawn_without_replacement() -> None:
    """The first of two draws by softmax, the second by what is left of it, as multinomial does."""
    confidence, temperature, num_draws = np.array([0.1, 0.4, 0.9]), 0.5, 6000
    generator = np.random.default_rng(0)
    counts = np.zeros(3)
    for _ in range(num_draws):
        chosen = choose_tempered(confidence, 2, temperature, generator.random(3))
        assert chosen.sum() == 2
        counts += chosen
    p = np.exp(confidence / temperature)
    p /= p.sum()
    left_out = [
        sum(p[a] * p[b] / (1 - p[a]) for a, b in ((j, k), (k, j)))
        for j, k in ((1, 2), (0, 2), (0, 1))
    ]
    np.testing.assert_allclose(1 - counts / num_draws, left_out, atol=0.02)


@pytest.mark.parametrize("numbers", [[0.0, 0.0, 0.0], [1 - 2**-53] * 3])
def test_extreme_numbers_still_choose(numbers) -> None:
    chosen = choose_tempered(np.array([0.5, 0.9, 0.5]), 2, 0.1, np.array(numbers))
    assert np.flatnonzero(chosen).tolist() == [0, 1]
    assert not math.isnan(chosen.sum())
