"""The arg-max and the seeded draw, against torch's own softmax and diffusers' filters."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from diffusers import BlockRefinementScheduler
from hypothesis import given
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from lowtide.decode.sampling import Sampling, choose_next, choose_tokens, uniform
from lowtide.errors import NumericError

VOCAB = 50


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def draw(logits: torch.Tensor, sampling: Sampling, num_passes: int = 0) -> tuple[list, list]:
    positions = list(range(len(logits)))
    tokens, confidence = choose_tokens(logits.clone(), sampling, positions, num_passes)
    return tokens.tolist(), confidence.tolist()


def test_the_arg_max_and_its_probability() -> None:
    logits = random_logits(40)
    tokens, confidence = choose_tokens(logits.clone(), Sampling(), range(40), 0)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    np.testing.assert_allclose(confidence, logits.softmax(-1).max(-1).values, rtol=1e-6)
    assert (tokens.dtype, confidence.dtype) == (np.int64, np.float32)


def test_the_lowest_id_wins_a_tie() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, [7, 9, 40]] = 2.0
    assert draw(logits, Sampling())[0] == [7, 7, 7]


def test_an_excluded_token_is_not_chosen() -> None:
    logits = random_logits(8)
    best = logits.argmax(-1)
    logits[:, 13] = 99.0
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature, top_k=1)
        tokens, _ = choose_tokens(logits.clone(), sampling, range(8), 0, excluded=13)
        assert tokens.tolist() == best.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_an_error(temperature, bad) -> None:
    logits = random_logits(3)
    logits[1] = bad if bad < 0 else logits[1]
    logits[1, 5] = bad
    with pytest.raises(NumericError, match="position 71"):
        choose_tokens(logits, Sampling(temperature), [70, 71, 72], 0)


def test_a_logit_of_minus_infinity_is_only_never_chosen() -> None:
    logits = random_logits(4)
    logits[:, 10:] = -math.inf
    assert all(token < 10 for token in draw(logits, Sampling(1.0))[0])


def test_draws_do_not_depend_on_the_other_rows() -> None:
    logits, sampling = random_logits(12), Sampling(0.8, top_k=20, top_p=0.9, seed=5)
    together = draw(logits, sampling)[0]
    one_by_one = [
        int(choose_tokens(logits[[row]].clone(), sampling, [row], 0)[0][0]) for row in range(12)
    ]
    assert together == one_by_one


def test_seed_pass_and_position_change_the_draw() -> None:
    numbers = {uniform(seed, position, passes) for seed in range(5) for position in range(5)
               for passes in range(5)}  # fmt: skip
    assert len(numbers) == 125
    assert all(0 <= number < 1 for number in numbers)
    assert uniform(2**63 - 1, 10**6, 10**6) == uniform(2**63 - 1, 10**6, 10**6)


def test_drawn_tokens_follow_the_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    expected = (logits / 0.7).softmax(-1)[0]
    rows = logits.expand(4000, -1)
    tokens, confidence = draw(rows, Sampling(0.7, seed=1))
    counts = torch.bincount(torch.tensor(tokens), minlength=4) / 4000
    torch.testing.assert_close(counts, expected, atol=0.03, rtol=0)
    torch.testing.assert_close(torch.tensor(confidence), expected[torch.tensor(tokens)])


@given(
    st.integers(0, 1000),
    st.none() | st.integers(1, VOCAB + 5),
    st.none() | st.floats(0.01, 1.0),
    st.floats(0.1, 3.0),
)
def test_filters_are_the_published_ones(seed, top_k, top_p, temperature) -> None:
    """Every drawn token is one that diffusers' filters keep, with the probability they give it."""
    logits = random_logits(6, seed)
    tokens, confidence = draw(logits, Sampling(temperature, top_k, top_p, seed))
    filtered = BlockRefinementScheduler._top_k_filtering(logits / temperature, top_k)
    filtered = BlockRefinementScheduler._top_p_filtering(filtered, top_p)
    probability = filtered.softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    np.testing.assert_allclose(confidence, probability, rtol=1e-3)


@given(
    st.integers(0, 1000),
    st.none() | st.integers(1, VOCAB),
    st.none() | st.floats(0.2, 1.0),
    st.floats(0.001, 1.0),
)
def test_min_p_is_that_of_transformers(seed, top_k, top_p, min_p) -> None:
    """Every drawn token is one that transformers' filters keep, with the probability they give."""
    logits = random_logits(6, seed)
    sampling = Sampling(0.8, top_k, top_p, seed, min_p)
    filtered = logits / 0.8
    if top_k is not None:
        filtered = TopKLogitsWarper(top_k)(None, filtered)
    if top_p is not None:
        filtered = TopPLogitsWarper(top_p)(None, filtered)
    probability = MinPLogitsWarper(min_p)(None, filtered).softmax(-1)
    samplings = [sampling._replace(seed=seed + row) for row in range(6)]
    tokens = choose_next(logits.clone(), samplings, range(6))
    for row, (token, each) in enumerate(zip(tokens, samplings, strict=True)):
        [alone], [confidence] = choose_tokens(logits[[row]].clone(), each, [row], 0)
        assert token == alone
        np.testing.assert_allclose(confidence, probability[row, token], rtol=1e-3)


def test_the_next_tokens_are_each_chosen_their_own_way() -> None:
    logits = random_logits(3)
    samplings = [Sampling(), Sampling(5.0, seed=1), Sampling(5.0, top_k=1)]
    tokens = choose_next(logits.clone(), samplings, [4, 4, 4]).tolist()
    best = logits.argmax(-1).tolist()
    assert (tokens[0], tokens[2]) == (best[0], best[2])
    drawn, _ = choose_tokens(logits[1:2].clone(), samplings[1], [4], 0)
    assert tokens[1] == drawn[0]


@given(st.integers(0, 1000), st.none() | st.integers(1, VOCAB), st.floats(0.01, 1.0))
def test_filters_never_contradict_the_arg_max(seed, top_k, share) -> None:
    """Without temperature they mean nothing; with it the likeliest token always passes them all."""
    logits = random_logits(2, seed)
    least = Sampling(1.0, 1, 1e-6, seed, 1.0)
    samplings = [Sampling(0.0, top_k, share, seed, share), least]
    assert choose_next(logits.clone(), samplings, [3, 3]).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 100.0])
def test_extreme_temperatures_stay_finite(temperature) -> None:
    logits = random_logits(5) * 100
    tokens, confidence = draw(logits, Sampling(temperature))
    assert all(0 < value <= 1 for value in confidence)
    if temperature < 1:
        assert tokens == logits.argmax(-1).tolist()
