"""What somebody sees who starts for the first time; no speed is judged here."""

from __future__ import annotations

import io

import pytest
import start_up
from rich.console import Console

from lowtide.cli import screen


def test_a_bar_goes_when_its_stage_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80)
    monkeypatch.setattr(screen, "stderr_console", lambda: console)
    with screen.ProgressBars() as progress:
        progress("dense weights", 1, 2)
        progress("dense weights", 2, 2)
        progress("experts", 1, 2)
        file.truncate(0)
    assert "experts" in file.getvalue()
    assert "dense weights" not in file.getvalue()


def test_starts_are_timed_and_failures_are_no_results() -> None:
    start = start_up._start(("-c", "print(sum(range(10**6)))"))
    assert start.cpu_s > 0 and start.first_output_s > 0
    with pytest.raises(start_up.subprocess.CalledProcessError):
        start_up._start(("-c", "raise SystemExit(3)"))
