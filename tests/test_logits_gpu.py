"""Transfers between the host and a real GPU in every pass, queued far ahead."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lowtide.decode.logits import tiled_logits
from lowtide.decode.sampling import ArgMax, Sampling, choose_tokens
from lowtide.memory.pinned_copies import to_device

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
VOCAB = 50_000


@pytest.fixture
def is_busy() -> None:
    """Queue work on the GPU that delays further work by some 100 ms."""
    matrix = torch.randn(8192, 8192, device=GPU)
    for _ in range(20):
        matrix = matrix @ matrix


@pytest.mark.usefixtures("is_busy")
def test_rows_are_those_that_were_sent_although_nothing_waits() -> None:
    sent = [to_device(GPU, torch.full((512,), i), torch.arange(i, i + 512)) for i in range(300)]
    for i, (token_ids, positions) in enumerate(sent):
        assert (token_ids.cpu() == i).all()
        assert positions.cpu().tolist() == list(range(i, i + 512))


@pytest.mark.usefixtures("is_busy")
def test_choices_are_the_hosts() -> None:
    """Draws to the bit, from the same logits; the arg-max's probability but for its last bits."""
    hidden = 3 * torch.randn(100, VOCAB, generator=torch.Generator().manual_seed(0))
    hidden[:, [7, 9]] = 30.0  # a tie
    hidden[50:, [7, 9]] = 0.0
    is_drawn = np.arange(100) % 7 < 2
    model = SimpleNamespace(logits=lambda rows: rows.clone(), mixes_rows=lambda rows: False)
    num_seen = 0
    for part, logits in tiled_logits(model, hidden.to(GPU), np.arange(100), is_drawn):
        num_seen += part.stop - part.start
        assert isinstance(logits, ArgMax) != is_drawn[part.start]
        sampling = Sampling(0.8, top_p=0.9, seed=3) if is_drawn[part.start] else Sampling()
        positions = range(part.start, part.stop)
        expected = choose_tokens(hidden[part].clone(), sampling, positions, 0)
        tokens, confidence = choose_tokens(logits, sampling, positions, 0)
        assert tokens.tolist() == expected[0].tolist()
        np.testing.assert_allclose(
            confidence, expected[1], rtol=0 if sampling.temperature else 1e-5
        )
    assert num_seen == 100
