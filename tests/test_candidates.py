"""Candidates from rows of logits, against torch's softmax in float64 and the published samplers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from lowtide.decode.candidates import LOG_OFFSET, Candidates, Reading, read_rows, row_statistics
from lowtide.decode.row_reading import guided
from lowtide.decode.sampling import Sampling
from lowtide.errors import NumericError

VOCAB = 50


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def read(logits: torch.Tensor, reading: Reading, num_steps: int = 0) -> Candidates:
    return read_rows(logits.clone(), reading, np.arange(len(logits)), num_steps)


def test_statistics_are_those_of_the_softmax() -> None:
    logits = random_logits(40)
    statistics = row_statistics(logits.clone(), needs_entropy=True)
    p = logits.double().softmax(-1)
    ordered = p.sort(descending=True).values
    assert statistics.best.tolist() == p.argmax(-1).tolist()
    assert statistics.greatest.tolist() == logits.max(-1).values.tolist()
    np.testing.assert_allclose(statistics.probability, ordered[:, 0], rtol=1e-6)
    np.testing.assert_allclose(statistics.second, ordered[:, 1], rtol=1e-6, atol=1e-12)
    entropy = -(p * (p + LOG_OFFSET).log()).sum(-1)
    np.testing.assert_allclose(statistics.entropy, entropy, rtol=1e-5, atol=1e-6)
    assert statistics.probability.dtype == np.float64


def test_probabilities_that_are_nearly_one_are_told_apart() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 7] = torch.tensor([30.0, 32.0, 31.0])
    probability = read(logits, Reading(Sampling())).probability
    assert (probability.astype(np.float32) == 1).all()
    assert probability.argsort().tolist() == [0, 2, 1]
    np.testing.assert_allclose(1 - probability, 49 * np.exp([-30.0, -32.0, -31.0]), rtol=1e-3)


@pytest.mark.parametrize("is_measured_as_drawn", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_an_error(bad, temperature, is_measured_as_drawn) -> None:
    logits = random_logits(3)
    logits[1] = bad if bad < 0 else logits[1]
    logits[1, 5] = bad
    reading = Reading(Sampling(temperature, top_k=3), is_measured_as_drawn)
    with pytest.raises(NumericError, match="position 1 "):
        read(logits, reading)


def test_llada_measures_what_it_draws_by_its_own_softmax() -> None:
    """Source: LLaDA's `generate`: the noise is on the choice, not on its confidence."""
    logits = random_logits(30)
    candidates = read(logits, Reading(Sampling(5.0, seed=3), needs_entropy=True))
    p = logits.double().softmax(-1)
    assert candidates.tokens.tolist() != p.argmax(-1).tolist()
    expected = p[torch.arange(30), torch.from_numpy(candidates.tokens)]
    np.testing.assert_allclose(candidates.probability, expected, rtol=1e-5)
    entropy = -(p * (p + LOG_OFFSET).log()).sum(-1)
    np.testing.assert_allclose(candidates.entropy, entropy, rtol=1e-5)


def published_shape(logits: torch.Tensor, temperature, top_p, top_k) -> torch.Tensor:
    """Probabilities as Dream's `sample_tokens` has them, float64."""
    logits = logits.double()
    if temperature > 0:
        logits = logits / temperature
    if top_p is not None and top_p < 1:
        ordered, ids = logits.sort(descending=True)
        is_out = ordered.softmax(-1).cumsum(-1) > top_p
        is_out[..., 1:] = is_out[..., :-1].clone()
        is_out[..., 0] = False
        is_out = torch.zeros_like(is_out).scatter(-1, ids, is_out)
        logits = logits.masked_fill(is_out, torch.finfo(logits.dtype).min)
    if top_k is not None:
        least = logits.topk(min(top_k, VOCAB)).values[..., -1, None]
        logits = logits.masked_fill(logits < least, torch.finfo(logits.dtype).min)
    return logits.softmax(-1)


@examples(40)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.0, 0.2, 1.0, 3.0]),
    top_p=st.none() | st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    top_k=st.none() | st.integers(1, VOCAB + 5),
)
def test_dream_measures_after_temperature_and_filters(seed, temperature, top_p, top_k) -> None:
    logits = random_logits(6, seed)
    sampling = Sampling(temperature, top_k, top_p, seed)
    candidates = read(logits, Reading(sampling, True, needs_entropy=True), num_steps=seed % 7)
    p = published_shape(logits, temperature, top_p, top_k)
    chosen = p[torch.arange(6), torch.from_numpy(candidates.tokens)]
    assert (chosen > 0).all()
    if temperature == 0:
        assert candidates.tokens.tolist() == p.argmax(-1).tolist()
    np.testing.assert_allclose(candidates.probability, chosen, rtol=1e-4)
    ordered = p.sort(descending=True).values
    np.testing.assert_allclose(candidates.margin, ordered[:, 0] - ordered[:, 1], atol=1e-5)
    entropy = -(p * (p + LOG_OFFSET).log()).sum(-1)
    np.testing.assert_allclose(candidates.entropy, entropy, atol=1e-5)


@pytest.mark.parametrize("is_measured_as_drawn", [False, True])
def test_draws_follow_the_tempered_distribution(is_measured_as_drawn) -> None:
    row, num_draws = random_logits(1, 4)[:, :6].clone(), 4000
    reading = Reading(Sampling(2.0, seed=1), is_measured_as_drawn)
    logits = row.expand(num_draws, -1)
    tokens = read(logits, reading).tokens
    shares = np.bincount(tokens, minlength=6) / num_draws
    np.testing.assert_allclose(shares, (row[0] / 2).softmax(-1), atol=0.025)


@pytest.mark.parametrize("is_measured_as_drawn", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_an_excluded_token_is_never_a_candidate(temperature, is_measured_as_drawn) -> None:
    logits = random_logits(60)
    logits[:, 13] = 99.0
    sampling = Sampling(temperature, top_p=0.9)
    reading = Reading(sampling, is_measured_as_drawn, excluded=13)
    assert 13 not in read(logits, reading).tokens.tolist()


def test_guidance_is_the_published_formula() -> None:
    conditional, unconditional = random_logits(4, 1), random_logits(4, 2)
    expected = unconditional + (0.7 + 1) * (conditional - unconditional)
    assert torch.equal(guided(conditional.clone(), unconditional, np.full(4, 1.7)), expected)
