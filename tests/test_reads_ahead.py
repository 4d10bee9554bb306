"""Reading ahead: what it saves, and that it is kept where it was measured to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.policies.reads_ahead import NUM_KEPT, NUM_TRIED, AheadTrial, read_ahead


@pytest.mark.parametrize(("ahead_s", "is_kept"), [(0.9, True), (0.99, False), (1.1, False)])
def test_what_saves_time_is_kept(ahead_s: float, is_kept: bool) -> None:
    trial = AheadTrial()
    for _ in range(3):
        tried = []
        for _ in range(2 * NUM_TRIED):
            tried.append(trial.is_on)
            trial.note_seconds(ahead_s if trial.is_on else 1.0)
        assert sum(tried) == NUM_TRIED
        for _ in range(NUM_KEPT):
            assert trial.is_on is is_kept
            trial.note_seconds(1.0)


def test_what_reads_ahead_save() -> None:
    # Four experts of 2 s, three of them asked for, in 5 s.
    assert read_ahead(3, 1, 5.0, 2.0) == (0.75 * 5, 5.0, 3 * 5 / 8)
    # One is read yet that nothing asks for: its piece is waited for.
    assert read_ahead(3, 1, 5.0, 2.0, piece_s=0.4).saved_s == pytest.approx(0.75 * 5 - 0.1)
    assert read_ahead(3, 1, 9.0, 2.0, piece_s=0.4) == (6.0, 8.0, 3)
    assert read_ahead(0, 2, 1.0, 2.0, piece_s=0.4) == (-0.4, 1.0, 0)
    assert read_ahead(2, 0, 0.0, 2.0) == (0, 0, 0)
    assert read_ahead(0, 0, 1.0, 2.0) == (0, 0, 0)
    assert read_ahead(2, 0, 1.0, 0.0).num_useful == 2, "where a read takes no time"


@given(
    num_right=st.integers(0, 9),
    num_wrong=st.integers(0, 9),
    window_s=st.floats(0, 20),
    read_s=st.floats(0, 3),
)
def test_no_more_is_saved_than_is_read(
    num_right: int, num_wrong: int, window_s: float, read_s: float
) -> None:
    found = read_ahead(num_right, num_wrong, window_s, read_s)
    assert 0 <= found.saved_s <= found.done_s <= window_s + 1e-9
    assert found.saved_s <= num_right * read_s + 1e-9
    assert found.num_useful <= num_right + 1e-9
