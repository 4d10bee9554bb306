"""A wheel: kernels inside, for a machine without a compiler; what does not fit here is not used.

It is made from the sources of an sdist, whose tests pass on what was installed.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from programs import python

from lowtide.errors import UnsupportedError
from lowtide.kernels.cpu import building, library
from lowtide.kernels.cpu.sources import Digests, Part

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
    alone = Part("answer", (source,), source.parent)
    built = source.parent / "built" / building.library_name(alone, Digests())
    built.parent.mkdir()
    compiled.rename(built)
    return built


def test_what_a_wheel_has_needs_no_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_in_a_wheel(source)
    monkeypatch.setattr(building, "find_compiler", no_compiler)
    assert library.load_library(source).answer() == 42


def test_another_machine_finds_what_was_compiled_for_it(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Part("answer", (source,), source.parent)
    made = [building.library_name(alone, Digests(machine=name)) for name in ("x86_64", "aarch64")]
    for name, expected in zip(("x86_64", "aarch64"), made, strict=True):
        monkeypatch.setattr(platform, "machine", lambda name=name: name)
        assert building.library_name(alone, Digests()) == expected
    assert made[0] != made[1]


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
    monkeypatch.setattr(building, "find_compiler", no_compiler)
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


PIP_WHEEL = (
    *(sys.executable, "-m", "pip", "wheel"),
    *("--no-deps", "--no-build-isolation", "--quiet"),
)
SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
NOT_KEPT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "shared")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources in the sdist of a clean checkout, unpacked."""
    made = tmp_path_factory.mktemp("sources")
    checkout = shutil.copytree(REPOSITORY, made / "checkout", ignore=NOT_KEPT)
    command = [sys.executable, "-c", SDIST, str(made)]
    subprocess.run(command, cwd=checkout, check=True)
    [archive] = made.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(made, filter="data")
    return made / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def installed(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wheel of these sources was unpacked."""
    made = tmp_path_factory.mktemp("wheel")
    subprocess.run([*PIP_WHEEL, "-w", str(made), str(sources)], check=True)
    [wheel] = made.glob("*.whl")
    assert "-py3-none-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(made / "installed")
    return made / "installed"


@pytest.mark.slow
def test_a_wheel_brings_its_kernels(installed: Path, tmp_path: Path) -> None:
    done = python(
        "-c",
        KERNELS_OF_THE_WHEEL,
        str(installed),
        timeout=None,
        env={"PYTHONPATH": str(installed), "HOME": str(tmp_path), "PATH": ""},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "compiled" in done.stdout
    assert not (tmp_path / ".cache/lowtide/kernels").exists()


@pytest.mark.slow
def test_a_wheel_for_any_platform_has_sources_alone(sources: Path, tmp_path: Path) -> None:
    option = "--config-settings=--build-option=--plat-name=any"
    subprocess.run([*PIP_WHEEL, option, "-w", str(tmp_path), str(sources)], check=True)
    [wheel] = tmp_path.glob("*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert any(name.endswith("dense/processor.cpp") for name in names)
    assert not any(name.endswith(".so") for name in names)
    assert any(name.endswith("share/man/man1/lowtide.1") for name in names)


TESTED_ELSEWHERE = ("options", "chat", "end_to_end", "sampling")
PLACE = "import lowtide\ndef test_place():\n    assert lowtide.__file__.startswith({!r})\n"


@pytest.mark.slow
def test_what_is_installed_passes_the_tests_of_the_sources(
    sources: Path, installed: Path, tmp_path: Path
) -> None:
    """Some of them, in a folder without the package: what is tested is the wheel's."""
    for name in ("tests", "benchmarks"):
        shutil.copytree(sources / name, tmp_path / name)
    shutil.copy(sources / "pyproject.toml", tmp_path)
    (tmp_path / "tests" / "test_place.py").write_text(PLACE.format(str(installed)))
    files = [f"tests/test_{name}.py" for name in ("place", *TESTED_ELSEWHERE)]
    done = python(
        "-m",
        "pytest",
        "-q",
        "-x",
        "-m",
        "not slow and not gpu",
        *files,
        timeout=None,
        env={**os.environ, "PYTHONPATH": str(installed), "HOME": str(tmp_path)},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
