"""A user who has no home, or a full one: everything runs, and what would be kept is not."""

from __future__ import annotations

import io
import os
import pwd
import sys
from pathlib import Path
from typing import Any

import pytest
from programs import python

from lowtide.cli.line_editor import LineEditor, history_file
from lowtide.errors import StorageError
from lowtide.files.folders import cache_folder, state_folder
from lowtide.hardware.machine import this_machine
from lowtide.hardware.store import keep_rates, kept_rates
from lowtide.replay.calibration import default_path
from lowtide.replay.trace import TraceShape


def no_user(number: int) -> Any:
    raise KeyError(f"getpwuid(): uid not found: {number}")


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as a number without a name."""
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_user)


def test_what_has_no_place_is_refused_with_the_way_out(homeless: None) -> None:
    with pytest.raises(StorageError, match="set HOME or XDG_CACHE_HOME"):
        cache_folder()
    with pytest.raises(StorageError, match="set HOME or XDG_STATE_HOME"):
        state_folder()


def test_a_home_that_depends_on_the_folder_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every folder would get a cache of its own, and compile."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "relative")
    with pytest.raises(StorageError, match="no home"):
        cache_folder()


def test_a_place_of_its_own_will_do(
    homeless: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "lowtide"
    path = default_path(tmp_path, "Any", TraceShape(1, 2, 3, 4, 5))
    assert path.parent == tmp_path / "lowtide" / "calibrations"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the specification has ignored
    with pytest.raises(StorageError, match="no home"):
        default_path(tmp_path, "Any", TraceShape(1, 2, 3, 4, 5))


HOMELESS = """
import os, pwd, sys
for name in ("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
    os.environ.pop(name, None)
def no_user(number):
    raise KeyError(f"getpwuid(): uid not found: {number}")
pwd.getpwuid = no_user
from lowtide.cli.main import main
sys.argv = ["lowtide", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "demo:autoregressive"],
        ["chat", "demo:autoregressive", "--max-tokens", "2"],
    ],
    ids=["plan", "chat"],
)
def test_a_model_runs_all_the_same(arguments: list[str], tmp_path: Path) -> None:
    result = python("-c", HOMELESS, *arguments, "--context", "64", input="2 + 2", cwd=tmp_path)
    assert result.returncode == 0 and result.stdout.strip(), result.stderr
    assert "Traceback" not in result.stderr
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("arguments", [["ls"], ["plan", "org/name"], ["pull", "org/name"]], ids=str)
def test_models_of_the_hub_have_no_place(arguments: list[str], tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    result = python("-c", HOMELESS, *arguments, env=env, cwd=tmp_path)
    assert result.returncode == 1 and "set HOME or HF_HOME" in result.stderr, result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("name", ["HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"])
def test_a_variable_that_the_hub_s_library_cannot_read_is_told(name: str) -> None:
    result = python("-m", "lowtide", "pull", "org/name", env={**os.environ, name: "30s"})
    assert result.returncode == 1 and "must be whole seconds" in result.stderr, result.stderr
    assert "Traceback" not in result.stderr


FULL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
from lowtide.cli.main import main
sys.argv = ["lowtide", *sys.argv[1:]]
main()
"""


def test_a_model_runs_where_the_home_is_on_a_full_disk(tmp_path: Path) -> None:
    """Not a byte can be written to any file: kernels are not kept, nor anything else."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    asked = ["generate", "demo:autoregressive", "2 + 2", "--max-tokens", "2", "--context", "64"]
    result = python("-c", FULL, *asked, env=env | {"HOME": str(tmp_path)}, timeout=300)
    assert result.returncode == 0 and result.stdout.strip(), result.stderr
    assert "Traceback" not in result.stderr
    assert "Compiling" not in result.stderr or "torch's products are used" in result.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_rates_are_not_kept_and_said_so(homeless: None, caplog: pytest.LogCaptureFixture) -> None:
    machine = this_machine()
    assert kept_rates(machine) == () and not caplog.records
    keep_rates(machine, ())
    assert "no home" in caplog.text and "not kept" in caplog.text


def test_lines_are_read_without_a_history(homeless: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert history_file() is None and LineEditor([], None).read() == "hello"
