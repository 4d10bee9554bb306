"""The C library's heap, which keeps what was freed for what comes next."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def return_heap() -> None:
    """Return freed memory of the heap to the system, as far as the C library can (glibc's)."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
