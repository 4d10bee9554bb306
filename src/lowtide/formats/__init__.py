"""Formats of matrices in files and in memory; each is one file here, or registered by others.

    formats()["MXFP4 blocks"].unpack(blocks, scales)

Reading files needs no torch; kernels for a kept format import it when asked.
"""

from __future__ import annotations

from lowtide.formats.matrix import MatrixFormat, StoredMatrix
from lowtide.formats.registry import (
    can_load,
    format_of,
    formats,
    loadable_dtypes,
    register,
    unregister,
)

__all__ = [
    "MatrixFormat",
    "StoredMatrix",
    "can_load",
    "format_of",
    "formats",
    "loadable_dtypes",
    "register",
    "unregister",
]
