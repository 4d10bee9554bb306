"""Record of a pass of `make test-kernels` with everything that it depends on as it is now.

    python tools/kernel_tests.py passed   # 0: it has, so that `.ci/run` may leave it out
    python tools/kernel_tests.py record   # it just did

What is kept is a digest in the user's cache.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from parts import part_of

from lowtide.errors import StorageError, UnsupportedError
from lowtide.files.folders import cache_folder
from lowtide.kernels.cpu.compiler import find_compiler

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = ("cli", "serve")
"""Rooms of the package that the kernels' tests do not import, `_SINGLE_FILES` apart."""
_SINGLE_FILES = (
    *("constraints.txt", "pyproject.toml", "tools/sanitize.py"),
    "src/lowtide/cli/interrupts.py",
)
_SUFFIXES = (".py", ".cpp", ".hpp", ".json", ".toml")
_PROCESSOR = Path("/proc/cpuinfo")
_VARIABLES = ("HYPOTHESIS_PROFILE", "LOWTIDE_TEST_MACHINE")


def main() -> int:
    if sys.argv[1:] not in (["record"], ["passed"]):
        print(__doc__, file=sys.stderr)
        return 2
    now = digest(ROOT)
    try:
        kept = cache_folder() / "kernel-tests-passed"
        if sys.argv[1:] == ["passed"]:
            return 0 if kept.exists() and kept.read_text() == now else 1
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(now)
    except (OSError, StorageError) as error:  # then they run once more: no failure of theirs
        print(f"Nothing is kept: {error}", file=sys.stderr)
        return 0 if sys.argv[1:] == ["record"] else 1
    return 0


def digest(root: Path) -> str:
    """Return a digest of everything that the kernels' tests depend on.

    That is code, tests with their shared modules, versions, machine, and the number of drawn
    examples.
    """
    told = [os.environ.get(name, "") for name in _VARIABLES]
    machine = (platform.python_version(), _processor(), _compiler(), *told)
    total = hashlib.sha256("\0".join(machine).encode())
    for path in files(root):
        total.update(f"\0{path.relative_to(root)}\0".encode() + path.read_bytes())
    return total.hexdigest()


def files(root: Path) -> Iterator[Path]:
    """All that is in the digest."""
    yield from (root / name for name in _SINGLE_FILES)
    package, tests = root / "src" / "lowtide", root / "tests"
    for path in sorted((*package.rglob("*.*"), *tests.rglob("*.*"))):
        is_other_test = path.name.startswith("test_") and part_of(path) != "kernels"
        is_other_room = any((package / room) in path.parents for room in LEFT_OUT)
        if path.suffix in _SUFFIXES and not is_other_test and not is_other_room:
            yield path


def _compiler() -> str:
    """Return the version that the kernels' compiler prints; "" without one."""
    try:
        return subprocess.check_output([find_compiler(), "--version"], text=True)
    except UnsupportedError:
        return ""


def _processor() -> str:
    """The kernels choose their code by what it can do."""
    lines = _PROCESSOR.read_text().splitlines() if _PROCESSOR.exists() else []
    return next((line for line in lines if line.startswith("flags")), platform.machine())


if __name__ == "__main__":
    sys.exit(main())
