"""A wheel: kernels inside, for a machine without a compiler; what does not fit here is not used."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lowtide.errors import UnsupportedError
from lowtide.kernels.cpu import library

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel's source, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "source" / "answer.cpp"
    path.parent.mkdir()
    path.write_text(SOURCE)
    return path


def no_compiler() -> str:
    raise UnsupportedError("There is no C++ compiler.")


def as_in_a_wheel(source: Path) -> Path:
    """Compiled, and put where a wheel has it."""
    library.load_library(source)
    [compiled] = (Path(os.environ["XDG_CACHE_HOME"]) / "lowtide/kernels").glob("answer-*.so")
    built = library._built((source,))
    built.parent.mkdir()
    compiled.rename(built)
    return built


def test_what_a_wheel_has_needs_no_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_in_a_wheel(source)
    monkeypatch.setattr(library, "find_compiler", no_compiler)
    assert library.load_library(source).answer() == 42


def test_a_library_that_does_not_load_is_compiled_here(source: Path) -> None:
    built = as_in_a_wheel(source)
    built.unlink()  # it is mapped: never changed in place
    built.write_bytes(b"of another system")
    assert library.load_library(source).answer() == 42


def test_a_library_of_other_sources_is_not_used(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_in_a_wheel(source)
    source.write_text(SOURCE.replace("42", "43"))
    assert library.load_library(source).answer() == 43
    monkeypatch.setattr(library, "find_compiler", no_compiler)
    source.write_text(SOURCE.replace("42", "44"))
    with pytest.raises(UnsupportedError, match="no C"):
        library.load_library(source)


KERNELS_OF_THE_WHEEL = """
import sys
from pathlib import Path
from lowtide.kernels.choice import choose_kernels
import lowtide, torch
assert Path(lowtide.__file__).is_relative_to(sys.argv[1]), lowtide.__file__
print(choose_kernels("auto", torch.bfloat16).name)
"""


@pytest.mark.slow
def test_a_wheel_brings_its_kernels(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*pip, "-w", str(tmp_path), str(REPOSITORY)], check=True)
    [wheel] = tmp_path.glob("*.whl")
    assert "-py3-none-linux_" in wheel.name
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    done = subprocess.run(
        [sys.executable, "-c", KERNELS_OF_THE_WHEEL, str(installed)],
        env={"PYTHONPATH": str(installed), "HOME": str(tmp_path), "PATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "compiled" in done.stdout
    assert not (tmp_path / ".cache/lowtide/kernels").exists()
