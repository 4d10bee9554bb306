"""The driver that `make sanitize` runs, here without a sanitizer, so that it keeps up."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.errors import UnsupportedError
from lowtide.kernels.cpu import library
from lowtide.kernels.cpu.compiler import find_compiler
from lowtide.kernels.cpu.library import load_parts
from lowtide.kernels.cpu.sources import all_parts, part

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

from sanitize import build_driver

_DEFINED = re.compile(r"^[\w:<>*]+ (lowtide_\w+)\(", re.MULTILINE)
_OF_KINDS = re.compile(r"^(WEIGHT|EXPERT)_OPERATORS\((\w+), ", re.MULTILINE)  # weight_operators.hpp


def test_the_driver_finds_nothing_wrong_in_any_function(tmp_path: Path) -> None:
    try:
        compiler = find_compiler()
    except UnsupportedError as error:
        pytest.skip(str(error))
    build_driver(compiler, tmp_path / "driver")
    load_parts(all_parts())
    paths = [library.loaded[name]._name for name in all_parts()]
    done = subprocess.run(
        [tmp_path / "driver", *paths], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    *called, verdict = done.stdout.splitlines()
    assert verdict == "all is as it should be"
    sources = [path for name in all_parts() for path in part(name).sources]
    defined = {name for path in sources for name in _defined(path.read_text())}
    assert defined and defined <= set(called), sorted(defined - set(called))


def _defined(source: str) -> list[str]:
    """The functions that a file has for Python."""
    of_kinds = [
        f"lowtide_{kind}_{name}"
        for has, kind in _OF_KINDS.findall(source)
        for name in (("multiply",) if has == "WEIGHT" else ()) + ("mlps", "experts")
    ]
    return _DEFINED.findall(source) + of_kinds
