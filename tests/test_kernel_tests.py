"""`tools/kernel_tests.py`: what has the kernels' tests run again, and what does not."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
from parts import part_of

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

import kernel_tests

FILES = {
    "constraints.txt": True,
    "pyproject.toml": True,
    "tools/sanitize.py": True,
    "src/lowtide/kernels/cpu/one.cpp": True,
    "src/lowtide/formats/one.py": True,
    "src/lowtide/families/one/sizes.json": True,
    "src/lowtide/llm.py": True,
    "src/lowtide/cli/interrupts.py": True,
    "src/lowtide/cli/one.py": False,
    "src/lowtide/serve/one.py": False,
    "tests/test_wheel.py": True,
    "tests/test_cli.py": False,
    "tests/oracle.py": True,
}


@pytest.mark.parametrize("changed", FILES)
def test_what_they_depend_on_has_them_run_again(tmp_path: Path, changed: str) -> None:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("as it was")
    before = kernel_tests.digest(tmp_path)
    (tmp_path / changed).write_text("as it is")
    assert (kernel_tests.digest(tmp_path) != before) == FILES[changed]


@pytest.mark.parametrize("name", ["HYPOTHESIS_PROFILE", "LOWTIDE_TEST_MACHINE"])
def test_another_run_of_them_is_not_this_one(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = kernel_tests.digest(kernel_tests.ROOT)
    monkeypatch.setenv(name, "another")
    assert kernel_tests.digest(kernel_tests.ROOT) != before


def test_another_compiler_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = kernel_tests.digest(kernel_tests.ROOT)
    (tmp_path / "c++").write_text("#!/bin/sh\necho another\n")
    (tmp_path / "c++").chmod(0o700)
    monkeypatch.setattr(kernel_tests, "find_compiler", lambda: str(tmp_path / "c++"))
    assert kernel_tests.digest(kernel_tests.ROOT) != before


def is_of_kernels(name: str) -> bool:
    return part_of(Path(f"{name}.py")) == "kernels"


def imported(text: str) -> set[str]:
    """Return the modules that a source imports, each by its whole name."""
    nodes = list(ast.walk(ast.parse(text)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}


def test_they_import_nothing_else() -> None:
    """No other room imports the modules that are left out: `test_imports.py`."""
    root = kernel_tests.ROOT
    tests = {path.stem: path.read_text() for path in (root / "tests").glob("*.py")}
    imports = {name: imported(text) & tests.keys() for name, text in tests.items()}
    found: set[str] = set()
    waiting = ["conftest", *filter(is_of_kernels, tests)]
    while waiting:
        found.add(name := waiting.pop())
        waiting += imports[name] - found
    assert all(is_of_kernels(name) for name in found if name.startswith("test_"))
    left_out = re.compile(rf"\blowtide\.(?:{'|'.join(kernel_tests.LEFT_OUT)})\b[.\w]*")
    named = {module for name in found for module in left_out.findall(tests[name])}
    in_digest = {path.relative_to(root).as_posix() for path in kernel_tests.files(root)}
    assert {f"src/{module.replace('.', '/')}.py" for module in named} <= in_digest


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
