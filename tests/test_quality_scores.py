"""Scores of logits, against direct computations; samples of a text, their masks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, kl_div

from lowtide.config import ModelConfig
from lowtide.decode.forced import ForcedText
from lowtide.errors import NumericError, StorageError, UsageError
from lowtide.families import read_config_in
from lowtide.lab import quality_scores
from lowtide.lab.quality_plot import front
from lowtide.lab.quality_scores import (
    Comparison,
    Estimate,
    ReferenceLogits,
    RowScores,
    ScoredRows,
    Scorer,
    by_mask,
)
from lowtide.lab.quality_text import (
    CONTEXT_TOKENS,
    Scope,
    TextSample,
    make_sample,
    nested_masks,
    num_rows,
)

GOLDENS = Path(__file__).parent / "goldens"
BLOCKS = read_config_in(GOLDENS / "llada2-a")
WHOLE = read_config_in(GOLDENS / "llada-a")
CAUSAL = read_config_in(Path(__file__).parents[1] / "src/lowtide/demo/autoregressive")
SCOPE = Scope(num_tokens=500, window_tokens=128, mask_ratios=(0.5, 0.15))


def score(
    logits: list[torch.Tensor], reference: list[torch.Tensor], folder: Path
) -> tuple[RowScores, RowScores, ScoredRows]:
    """Of two texts of 40 tokens, as a run and its reference would."""
    texts = tuple(ForcedText(list(range(i, i + 40)), 2) for i in range(2))
    sample = TextSample(texts[0], texts, (), 8)
    with ReferenceLogits(2 * 37, 50, folder) as kept:
        found = []
        for each, is_reference in ((reference, True), (logits, False)):
            scorer = Scorer(sample, kept, is_reference=is_reference)
            for text, rows in zip(texts, each, strict=True):
                scorer.begin(text)
                for first in range(0, 37, 5):
                    part = rows[first : first + 5]
                    scorer(0, np.arange(3 + first, 3 + first + len(part)), part)
            found.append(scorer.finish())
    return found[1][0], found[0][0], found[1][1]


@pytest.mark.parametrize("held_bytes", [0, 1 << 20])
def test_scores_are_those_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_bytes: int
) -> None:
    monkeypatch.setattr(quality_scores, "MAX_HELD_BYTES", held_bytes)
    torch.manual_seed(0)
    reference = [torch.randn(37, 50) * 3 for _ in range(2)]
    logits = [x + 0.3 * torch.randn(37, 50) for x in reference]
    scores, exact, rows = score(logits, reference, tmp_path / "spill")
    assert not list(tmp_path.glob("spill/*"))  # a nameless file
    own, other = torch.cat(logits).double(), torch.cat(reference).double()
    wanted = torch.cat([torch.arange(i + 3, i + 40) for i in range(2)])
    losses = cross_entropy(own, wanted, reduction="none")
    kl = kl_div(own.log_softmax(1), other.log_softmax(1), reduction="none", log_target=True).sum(1)
    assert np.allclose(scores.loss, losses) and np.allclose(scores.kl, kl)
    assert scores.is_right.tolist() == (own.argmax(1) == wanted).tolist()
    assert scores.is_same.tolist() == (own.argmax(1) == other.argmax(1)).tolist()
    compared = Comparison.of(scores, exact, rows)
    assert compared.perplexity == pytest.approx(math.exp(losses.mean()))
    assert compared.loss_difference == rows.estimate(scores.loss - exact.loss)
    assert compared.accuracy_difference == rows.estimate(scores.is_right - exact.is_right)
    assert compared.loss_difference.mean == pytest.approx(
        compared.loss.mean - rows.estimate(exact.loss).mean
    )
    assert compared.loss_difference.error < compared.loss.error  # it is one of pairs


def test_an_error_takes_neighbours_as_one_observation() -> None:
    random = np.random.default_rng(0)
    of_stretch = random.normal(size=200).repeat(8)
    rows = ScoredRows(np.zeros(1600, np.int64), np.arange(1600) // 8)
    found = rows.estimate(of_stretch)
    wanted = of_stretch[::8].std(ddof=1) / math.sqrt(200)
    assert found == Estimate(pytest.approx(of_stretch.mean()), pytest.approx(wanted))
    alone = ScoredRows(np.zeros(1600, np.int64), np.arange(1600)).estimate(of_stretch)
    assert alone.error is not None and found.error is not None
    assert alone.error == pytest.approx(found.error / math.sqrt(8), rel=0.01)
    assert (
        ScoredRows(np.zeros(8, np.int64), np.zeros(8, np.int64)).estimate(of_stretch[:8]).error
        is None
    )


def test_every_mask_counts_the_same() -> None:
    rows = ScoredRows(np.array([0] * 9 + [1]), np.arange(10))
    assert rows.estimate(np.array([1.0] * 9 + [3.0])).mean == 2.0
    scores = RowScores(np.arange(10.0), *(np.zeros(10) for _ in range(3)))
    compared = by_mask(scores, scores, rows, (0.9, 0.1))
    assert compared[0.9].loss.mean == 4.0 and compared[0.1].loss.mean == 9.0
    assert compared[0.1].num_rows == 1 and compared[0.1].loss.error is None


def test_logits_that_cannot_be_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = [torch.randn(37, 50) for _ in range(2)]
    broken = [logits[0], logits[1].clone()]
    broken[1][3, 7] = torch.nan
    with pytest.raises(NumericError, match="position 6"):
        score(broken, logits, tmp_path)
    monkeypatch.setattr(quality_scores, "MAX_HELD_BYTES", 0)
    with pytest.raises(StorageError, match="are free"):
        ReferenceLogits(1 << 40, 1 << 20, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="XDG_CACHE_HOME"):
        ReferenceLogits(2, 50, tmp_path / "file")


@pytest.mark.parametrize("config", [BLOCKS, WHOLE, CAUSAL], ids=["blocks", "whole", "causal"])
def test_windows_are_spread_over_a_text(config: ModelConfig) -> None:
    ids = list(range(5000))
    sample = make_sample(config, 4096, ids, [1], SCOPE)
    assert 500 <= sample.num_tokens < 700
    texts = (sample.warm_up, *sample.scored)
    for index, text in enumerate(texts):
        text.check(config.decoding.writes_in_order)
        first = index * (5000 // len(texts))
        assert text.token_ids == [1, *ids[first : first + 127]]
    assert sample.num_rows == sum(num_rows(text) for text in sample.scored)
    if not config.decoding.writes_in_order:
        assert sample.mask_ratios == (0.5, 0.15)
        for text in texts:
            more, less = text.masks
            assert (less <= more).all()
    else:
        assert all(text.num_context == CONTEXT_TOKENS for text in texts)
        assert sample.num_tokens == sample.num_rows


def test_a_short_text_gives_fewer_and_shorter_windows() -> None:
    few = make_sample(CAUSAL, 4096, list(range(300)), [], SCOPE)
    assert len(few.scored) == 1 and len(few.scored[0].token_ids) == 128
    short = make_sample(CAUSAL, 4096, list(range(140)), [], SCOPE)
    assert len(short.scored) == 1 and len(short.scored[0].token_ids) == 70
    small = make_sample(BLOCKS, 70, list(range(1000)), [], SCOPE)
    assert len(small.warm_up.token_ids) == 64
    for config, least in ((CAUSAL, 65), (BLOCKS, 64), (WHOLE, 16)):
        with pytest.raises(UsageError, match=f"of {2 * least - 1} tokens .* at least {least} "):
            make_sample(config, 4096, list(range(2 * least - 1)), [], SCOPE)
        assert make_sample(config, 4096, list(range(2 * least)), [], SCOPE).scored


@pytest.mark.parametrize(
    "values",
    [{"num_tokens": 0}, {"window_tokens": 0}]
    + [{"mask_ratios": x} for x in ((), (0.0,), (1.1,), (0.5, 0.5), (math.nan,))],
)
def test_scopes_that_cannot_be(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Scope(**values)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4),
    st.integers(0, 20),
)
def test_masks_hide_their_share_of_every_span(
    lengths: list[int], ratios: list[float], num_context: int
) -> None:
    ratios = sorted(ratios, reverse=True)
    edges = np.cumsum([num_context, *lengths])
    spans = list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
    masks = nested_masks(int(edges[-1]), spans, ratios, (1,))
    for mask, ratio in zip(masks, ratios, strict=True):
        assert not mask[:num_context].any()
        for start, stop in spans:
            assert mask[start:stop].sum() == max(1, round(ratio * (stop - start)))
    for more, less in zip(masks, masks[1:], strict=False):
        assert (less <= more).all()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_the_front_is_what_nothing_beats(pairs: list[tuple[int, int]]) -> None:
    is_best = front(pairs)
    assert any(is_best)
    for (speed, harm), best in zip(pairs, is_best, strict=True):
        beaten = any(s >= speed and h <= harm and (s > speed or h < harm) for s, h in pairs)
        assert best == (not beaten)
