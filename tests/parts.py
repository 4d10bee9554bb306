"""Files of tests: those that `make test` leaves to other targets, and those of a room."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "lowtide"
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))

PARTS = {
    "pages": (
        *("*benchmark*", "test_docs_*", "test_guide", "test_kernel_tests"),
        *("test_make_bench", "test_report", "test_same_bits"),
    ),
    "kernels": (
        *("test_*_kernels", "test_compiled_*", "test_ggml_formats", "test_buddy_twins"),
        *("test_cuda_device", "test_late_cuda", "test_sanitize", "test_triton*", "test_wheel"),
    ),
}


def part_of(path: Path) -> str:
    """Pages, kernels or, where neither says otherwise, the product."""
    for part, patterns in PARTS.items():
        if any(fnmatch(path.stem, pattern) for pattern in patterns):
            return part
    return "product"


def is_of_room(path: Path, room: str) -> bool:
    """Return True if a file of tests imports from a room of the package or is named after it."""
    imported = re.search(rf"^\s*(?:from|import) lowtide\.{room}\b", path.read_text(), re.MULTILINE)
    return imported is not None or path.stem.startswith(f"test_{room}_")


HAS_MODELS = (Path(__file__).parent / "goldens").exists()
"""False in an sdist, of which recorded models would be more than half."""

_OF_MODELS = re.compile(
    r"goldens\b|^\s*from (?:\w*oracle|hub_repos)\b", re.IGNORECASE | re.MULTILINE
)


def can_run(path: Path) -> bool:
    """Return False if a file of tests needs recorded models, which are not here."""
    return HAS_MODELS or _OF_MODELS.search(path.read_text()) is None
