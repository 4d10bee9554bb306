"""Forecasts of residency's worth, where routing stays, has favourites, or changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import default_rng

from lowtide.core import FloatArray, IntArray
from lowtide.policies.forecast import Forecast, stays

NUM_EXPERTS = 32
NUM_WANTED = 8


def observe(forecast: Forecast, experts: IntArray, num_tokens: int = 1) -> FloatArray:
    """One step of the only layer; the forecast after it."""
    hits = np.zeros((1, NUM_EXPERTS), np.int64)
    hits[0, experts] = num_tokens
    forecast.observe(hits, (hits > 0).astype(np.float64))
    return forecast()[0]


def hit_rate(forecast: Forecast, steps: list[IntArray]) -> float:
    """Share of the wanted experts among the best forecast ones, after half of the steps."""
    found, predicted = [], forecast()[0]
    for experts in steps:
        best = np.argsort(-predicted, kind="stable")[:NUM_WANTED]
        found.append(len(np.intersect1d(best, experts)) / len(experts))
        predicted = observe(forecast, experts)
    return float(np.mean(found[len(found) // 2 :]))


def favourite_steps(num_steps: int, seed: int = 0) -> list[IntArray]:
    """Independent draws, of which the first experts are the likeliest: the past is only noise."""
    draw = default_rng(seed)
    score = np.linspace(2.0, 0.0, NUM_EXPERTS)
    noise = draw.gumbel(size=(num_steps, NUM_EXPERTS))
    return [np.sort(np.argsort(-(score + one))[:NUM_WANTED]) for one in noise]


def test_routing_that_stays_is_followed_at_once() -> None:
    draw = default_rng(0)
    steps = [np.sort(draw.permutation(NUM_EXPERTS)[:NUM_WANTED]) for _ in range(10)]
    steps = [step for step in steps for _ in range(8)]
    assert hit_rate(Forecast(1, NUM_EXPERTS), steps) > 0.85


def test_favourites_are_learnt_from_a_long_past() -> None:
    steps = favourite_steps(200)
    best = float(np.mean([(step < NUM_WANTED).mean() for step in steps[100:]]))
    learnt = hit_rate(Forecast(1, NUM_EXPERTS), steps)
    last = np.mean([len(np.intersect1d(a, b)) for a, b in zip(steps, steps[1:], strict=False)])
    assert learnt > 0.9 * best > 1.1 * float(last) / NUM_WANTED


def test_a_calibration_is_known_from_the_first_step() -> None:
    frequency = np.linspace(100.0, 1.0, NUM_EXPERTS)[None]
    predicted = observe(Forecast(1, NUM_EXPERTS, frequency), np.array([NUM_EXPERTS - 1]))
    assert predicted.argmax() == NUM_EXPERTS - 1
    assert (np.diff(predicted[:-1]) < 0).all()
    blank = observe(Forecast(1, NUM_EXPERTS), np.array([NUM_EXPERTS - 1]))
    assert np.count_nonzero(blank) == 1


def test_a_pass_that_wants_everything_teaches_no_more_than_another() -> None:
    forecast, steps = Forecast(1, NUM_EXPERTS), favourite_steps(60)
    for step in steps:
        before = observe(forecast, step)
    observe(forecast, np.arange(NUM_EXPERTS), num_tokens=50)
    after = observe(forecast, steps[-1])
    shared = np.intersect1d(np.argsort(-before)[:NUM_WANTED], np.argsort(-after)[:NUM_WANTED])
    assert len(shared) >= NUM_WANTED - 2


def test_more_tokens_are_likelier_to_come_again() -> None:
    forecast = Forecast(1, NUM_EXPERTS)
    num_tokens = np.zeros((1, NUM_EXPERTS), np.int64)
    num_tokens[0, [3, 7]] = 1, 6
    forecast.observe(num_tokens, (num_tokens > 0).astype(np.float64))
    predicted = forecast()[0]
    assert predicted[7] > predicted[3] > 0


def test_worth_is_in_seconds() -> None:
    forecast = Forecast(1, NUM_EXPERTS)
    num_tokens = np.zeros((1, NUM_EXPERTS), np.int64)
    num_tokens[0, [1, 2]] = 9
    for _ in range(30):
        forecast.observe(num_tokens, np.where(num_tokens > 0, 3e-5, 0.0))
    assert forecast()[0, [1, 2]].sum() == pytest.approx(6e-5, rel=0.05)


@pytest.mark.parametrize("num_steps", [65, 66, 71])
def test_what_a_step_adds_is_known_before_it(num_steps: int) -> None:
    """See `Lowtide.begin_pass`. The mixture is not learnt from these steps, but every fourth."""
    draw, forecast = default_rng(num_steps), Forecast(3, NUM_EXPERTS)
    for left in range(num_steps, -1, -1):
        hits = draw.poisson(0.4, (3, NUM_EXPERTS))
        hits[:, 0] += 1
        before = np.empty(hits.shape)
        own = forecast.before(before)
        forecast.observe(hits, np.minimum(hits, 1.0))
        if not left:
            shares = np.minimum(hits, 1.0) * stays(hits)
            before += own * shares / shares.sum(axis=1, keepdims=True)
            seconds = before.clip(0.0) * np.minimum(hits, 1.0).sum(axis=1, keepdims=True)
            assert np.allclose(forecast(), seconds)


def test_a_layer_that_is_not_heard_of_keeps_what_it_knew() -> None:
    forecast, hits = Forecast(2, NUM_EXPERTS), np.zeros((2, NUM_EXPERTS), np.int64)
    hits[:, 3] = 5
    forecast.observe(hits, np.minimum(hits, 1.0))
    hits[0] = 0
    for _ in range(9):
        forecast.observe(hits, np.minimum(hits, 1.0))
    assert forecast()[:, 3] == pytest.approx([1.0, 1.0], rel=0.01)
    forecast.observe(0 * hits, 0.0 * hits)
    assert np.isfinite(forecast()).all()


@given(
    seed=st.integers(0, 9),
    scale=st.sampled_from([1e-9, 1e-5, 1.0]),
    num_layers=st.integers(1, 6),
)
def test_forecasts_are_finite_and_not_negative(seed: int, scale: float, num_layers: int) -> None:
    draw, forecast = default_rng(seed), Forecast(num_layers, NUM_EXPERTS)
    for _ in range(6):
        shape = num_layers, NUM_EXPERTS
        num_tokens = draw.integers(1, 500, shape) * (draw.random(shape) < 0.3)
        worth_s = scale * draw.random(shape) * draw.integers(0, 2, (num_layers, 1))
        forecast.observe(num_tokens, worth_s * (num_tokens > 0))
        predicted = forecast()
        assert predicted.shape == shape and np.isfinite(predicted).all()
        assert (predicted >= 0).all() and predicted.sum(axis=1).max() <= 10 * NUM_EXPERTS * scale
