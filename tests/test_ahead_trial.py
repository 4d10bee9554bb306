"""Reading ahead is kept where it was measured to save time."""

from __future__ import annotations

import pytest

from lowtide.experts.ahead_trial import NUM_KEPT, NUM_TRIED, AheadTrial


@pytest.mark.parametrize(("ahead_s", "is_kept"), [(0.9, True), (0.99, False), (1.1, False)])
def test_what_saves_time_is_kept(ahead_s: float, is_kept: bool) -> None:
    trial = AheadTrial()
    for _ in range(3):
        tried = []
        for _ in range(2 * NUM_TRIED):
            tried.append(trial.is_on)
            trial.took(ahead_s if trial.is_on else 1.0)
        assert sum(tried) == NUM_TRIED
        for _ in range(NUM_KEPT):
            assert trial.is_on is is_kept
            trial.took(1.0)
