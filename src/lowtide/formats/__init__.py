"""How a matrix lies in memory and in files: a format is one file here, or registered by others.

    formats()["MXFP4 blocks"].unpack(blocks, scales)

Without torch where files are read; what multiplies with a kept format imports it when asked.
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
