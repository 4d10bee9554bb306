"""Every script of examples/ runs as it stands, says what it should, and fits on a screen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
MAX_LINES = 40
SAYS = {
    "answer": ["12 21 40 57 93", "CXLVIII", "of the experts asked for were in memory"],
    "diffusion_live": ["░", "12 21 40 5", "15 tokens in 15 passes"],
    "own_format": ["12 21 40 57 93"],
    "own_policy": ["fair 12 21 40 57 93", "lru 12 21 40 57 93"],
    "serve_openai": ["12 21 40 57 93"],
    "stream": ["132", "36 tokens of the prompt were computed for the first answer"],
}
"""Pieces of each example's output, in this order."""


def test_every_example_is_tried_and_short() -> None:
    paths = list(EXAMPLES.glob("*.py"))
    assert {path.stem for path in paths} == set(SAYS)
    for path in paths:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES, path.name


@pytest.mark.parametrize("name", sorted(SAYS))
def test_it_runs_without_a_warning(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py")]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    place = 0
    for part in SAYS[name]:
        found = done.stdout.find(part, place)
        assert found >= 0, (part, done.stdout)
        place = found + len(part)
