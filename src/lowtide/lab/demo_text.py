"""What the demo models were not trained on: a part of the Python standard library."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

from lowtide.errors import UsageError


def is_held_out(module: str) -> bool:
    """Whether training left a source file out: one of twenty, by its path in the library."""
    return int(hashlib.sha256(module.encode()).hexdigest(), 16) % 20 == 0


def held_out_text() -> str:
    """The library's own modules that were left out, one after the other.

    Which there are depends on the version of Python. Raises UsageError where they lie nowhere.
    """
    library = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(library.glob("*.py")) if is_held_out(path.name)]
    if not paths:
        raise UsageError(f"{library} has no sources of the standard library; give --text FILE.")
    return "".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)
