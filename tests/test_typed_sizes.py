"""Budgets as people type them, from flags, the environment, a file and Python alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lowtide import LLM
from lowtide.cli.app import app
from lowtide.engine.planning import plan as planning
from lowtide.errors import UsageError
from lowtide.llm import plan_model

MODEL = str(Path(__file__).parent / "goldens" / "llada2-a")
CONTEXT = ["--context", "64"]
WAYS = ("flag", "environment", "file")


@pytest.fixture
def total_bytes(monkeypatch: pytest.MonkeyPatch) -> int:
    """A machine of 4 GiB."""
    monkeypatch.setattr(planning, "total_memory_bytes", lambda: 4 << 30)
    return 4 << 30


def run(verb: list[str], size: str, way: str, folder: Path) -> Any:
    """A command with this size as its budget, given in one of three ways."""
    arguments, env = [*verb[:1], MODEL, *verb[1:], *CONTEXT], {}
    if way == "flag":
        arguments += ["--host-memory", size]
    elif way == "environment":
        env["LOWTIDE_HOST_MEMORY"] = size
    else:
        (folder / "o.toml").write_text(
            f"host_memory = {size if size.isdecimal() else json.dumps(size)}"
        )
        arguments += ["--config", str(folder / "o.toml")]
    return CliRunner().invoke(app, arguments, env=env)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("size", "num_bytes"), [("9M", 9 << 20), ("0.01g", (1 << 30) // 100), ("12582912", 12 << 20)]
)
def test_sizes_are_understood(size: str, num_bytes: int, way: str, tmp_path: Path) -> None:
    result = run(["plan", "--json"], size, way, tmp_path)
    assert json.loads(result.stdout)["budget_bytes"] == num_bytes


@pytest.mark.parametrize("way", WAYS)
def test_a_bare_number_is_asked_about(way: str, tmp_path: Path) -> None:
    result = run(["plan"], "12", way, tmp_path)
    assert result.exit_code == 2 and "did you mean 12GiB?" in result.stderr


@pytest.mark.parametrize("size", [12, "12"])
def test_a_bare_number_in_python(size: int | str) -> None:
    with pytest.raises(UsageError, match=r"did you mean 12GiB\?"):
        plan_model(MODEL, host_memory=size, context=64)


def test_more_than_there_is(tmp_path: Path, total_bytes: int) -> None:
    told = "--host-memory 8.0 GiB is more than there is: this machine has 4.0 GiB"
    plan = run(["plan", "--json"], "8G", "flag", tmp_path)
    assert told in json.loads(plan.stdout)["reason"]
    asked = ["generate", "--prompt-ids", "1", "--max-tokens", "1", "--json"]
    answer = run(asked, "8G", "flag", tmp_path)
    assert answer.exit_code == 0 and answer.stderr.count(told) == 1
    within = run(["plan", "--json"], "4G", "flag", tmp_path)
    assert "more than there is" not in within.stdout


def test_more_than_there_is_in_python(total_bytes: int, caplog: pytest.LogCaptureFixture) -> None:
    assert "this machine has 4.0 GiB" in plan_model(MODEL, host_memory=8 << 30, context=64).reason
    LLM(MODEL, host_memory=8 << 30, context=64).close()
    assert "this machine has 4.0 GiB" in caplog.text
