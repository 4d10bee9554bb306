"""A user's first start; no speed is judged here."""

from __future__ import annotations

import io

import pytest
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
