"""Requests that a bidirectional model's decoder accepts, and those that it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.config import Canvas, DecodingDefaults
from lowtide.decode.masked_options import resolve
from lowtide.errors import UnsupportedError, UsageError
from lowtide.families import families
from lowtide.params import REMASKING_RULES, DiffusionParams


def published(name: str) -> DecodingDefaults:
    decoding = families()[name].published.decoding
    assert isinstance(decoding, Canvas)
    return decoding.defaults


def resolved(family: str, max_tokens: int = 256, **asked: object) -> DiffusionParams:
    return resolve(DiffusionParams(**asked), published(family), max_tokens, "TestModel")


def test_defaults_are_the_published_ones() -> None:
    assert resolved("llada") == DiffusionParams(
        block_length=128,
        steps=128,
        remasking="low_confidence",
        cfg_scale=0.0,
    )
    assert resolved("llada_moe").block_length == 32
    assert resolved("dream", 1024) == DiffusionParams(
        block_length=1024,
        steps=512,
        remasking="origin",
        eps=1e-3,
        cfg_scale=0.0,
    )
    assert resolved("llada", remasking="confidence_threshold").threshold == 0.9
    assert resolved("llada", remasking="factor").factor == 1.0
    assert resolved("llada", remasking="entropy").eps == 1e-3


def test_by_default_there_are_no_more_steps_than_tokens() -> None:
    assert resolved("llada", 40).steps == 40
    assert resolved("dream", 40).steps == 40
    assert resolved("dream", 40, steps=100).steps == 100


@given(
    st.sampled_from(["llada", "llada_moe", "dream"]),
    st.integers(1, 2000),
    st.sampled_from(REMASKING_RULES),
)
def test_defaults_suit_every_answer(family, max_tokens, rule) -> None:
    params = resolved(family, max_tokens, remasking=rule)
    assert params.remasking == rule and 1 <= params.block_length <= max_tokens
    if params.steps is not None:
        assert params.steps % -(-max_tokens // params.block_length) == 0


def test_steps_bound_the_threshold_where_nothing_else_does() -> None:
    rule = {"remasking": "confidence_threshold"}
    assert resolved("dream", **rule, steps=64).steps == 64
    assert resolved("dream", **rule).steps is None
    assert resolved("llada", **rule).steps is None
    assert resolved("dream", remasking="factor").steps is None
    for family, asked in [
        ("dream", {**rule, "block_length": 32}),
        ("llada", rule),
        ("dream", {"remasking": "factor"}),
    ]:
        with pytest.raises(UsageError, match="`steps` 64 mean nothing to `remasking`"):
            resolved(family, **asked, steps=64)


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"block_length": 24}, UsageError, "`block_length` 24 does not divide `max_tokens` 256"),
        ({"block_length": 512}, UsageError, "does not divide"),
        ({"block_length": 64, "steps": 10}, UsageError, "10 steps .* 4 blocks .* 8 or 12"),
        (
            {"block_length": 64, "steps": 3},
            UsageError,
            "3 steps .* 4 blocks of 64 tokens; choose 4",
        ),
        ({"remasking": "origin", "steps": 2**30}, UsageError, "takes 65536 at most"),
        (
            {"threshold": 0.9},
            UsageError,
            "`threshold` 0.9 .* choose `remasking` confidence_threshold",
        ),
        ({"remasking": "factor", "threshold": 0.9}, UsageError, "`threshold` 0.9 means nothing"),
        ({"factor": 1.0}, UsageError, "`factor` 1.0 means nothing to `remasking` 'low_confidence'"),
        ({"eps": 0.01}, UsageError, "`eps` 0.01 .* choose `remasking` origin or maskgit_plus"),
        ({"remasking": "origin", "alg_temp": 0.1}, UsageError, "`alg_temp` 0.1 means nothing"),
        ({"remasking": "random", "alg_temp": 0.0}, UsageError, "`alg_temp` 0.0 means nothing"),
        ({"edit_threshold": 0.5}, UnsupportedError, "`edit_threshold`: TestModel does not rewrite"),
        ({"max_post_steps": 4}, UnsupportedError, "`max_post_steps`: TestModel"),
    ],
)
def test_contradictions_are_refused_by_name(asked, error, message) -> None:
    with pytest.raises(error, match=message):
        resolved("llada", **asked)


@pytest.mark.parametrize(
    "asked",
    [
        {"eps": 0.0},
        {"eps": 1.0},
        {"eps": "0.1"},
        {"alg_temp": -0.1},
        {"factor": -1.0},
        {"factor": float("nan")},
        {"remasking": "highest_confidence"},
        {"remasking": 3},
    ],
)
def test_values_out_of_range_are_refused(asked) -> None:
    with pytest.raises(UsageError, match=next(iter(asked))):
        DiffusionParams(**asked)
