"""`tools/kernel_tests.py`: what has the kernels' tests run again, and what does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

import kernel_tests

FILES = {
    "constraints.txt": True,
    "src/lowtide/kernels/cpu/one.cpp": True,
    "src/lowtide/formats/one.py": True,
    "src/lowtide/cli/one.py": False,
    "tests/test_wheel.py": True,
    "tests/test_cli.py": False,
    "tests/oracle.py": True,
}


@pytest.mark.parametrize("changed", FILES)
def test_what_they_depend_on_has_them_run_again(tmp_path: Path, changed: str) -> None:
    for name in ("pyproject.toml", *FILES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("as it was")
    before = kernel_tests.digest(tmp_path)
    (tmp_path / changed).write_text("as it is")
    assert (kernel_tests.digest(tmp_path) != before) == FILES[changed]


def test_a_pass_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for word, ended in (("passed", 1), ("record", 0), ("passed", 0), ("", 2)):
        monkeypatch.setattr(sys, "argv", ["kernel_tests.py", word])
        assert kernel_tests.main() == ended


def test_where_nothing_can_be_kept_they_run_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for word, ended in (("record", 0), ("passed", 1)):
        monkeypatch.setattr(sys, "argv", ["kernel_tests.py", word])
        assert kernel_tests.main() == ended
