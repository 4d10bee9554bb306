"""The driver that `make sanitize` runs, here without a sanitizer, so that it keeps up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.errors import UnsupportedError
from lowtide.kernels.cpu.library import LIBRARIES, find_compiler, load_library

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

from sanitize import build_driver


def test_the_driver_finds_nothing_wrong(tmp_path: Path) -> None:
    try:
        compiler = find_compiler()
    except UnsupportedError as error:
        pytest.skip(str(error))
    build_driver(compiler, tmp_path / "driver")
    libraries = [str(load_library(*sources)._name) for sources in LIBRARIES]
    done = subprocess.run(
        [tmp_path / "driver", *libraries], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all is as it should be\n"
