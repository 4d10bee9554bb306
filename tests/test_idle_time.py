"""How long the link has nothing demanded of it, between two layers and between two passes."""

from __future__ import annotations

import pytest

from lowtide.experts import idle_time
from lowtide.experts.idle_time import IdleTime


def test_the_lesser_of_the_last_two_times_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = 0.0
    monkeypatch.setattr(idle_time, "perf_counter", lambda: clock_s)
    idle, expected = IdleTime(2), []
    for seconds in (3.0, 100.0, 4.0, 5.0):  # a pause between two requests is no pass's end
        idle.begin(1)
        clock_s += seconds
        idle.end()
        idle.end()  # nobody has left
        expected.append(idle.expected_s(1, 0.5))
    assert expected == [0.5, 3.0, 4.0, 4.0]
    assert idle.expected_s(0, 0.5) == 0.5
