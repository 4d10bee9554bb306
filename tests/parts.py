"""Tests that `make test` leaves to `make check-pages` and `make test-kernels`, by their files."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

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
