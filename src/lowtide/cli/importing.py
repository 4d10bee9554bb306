"""Ends the program in one line where its modules cannot be imported."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager

TYPE_CHECKING = False  # as in interrupts.py
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import NoReturn


@contextmanager
def imports_reported() -> Iterator[None]:
    """End the program with one clear line if the imports inside find no memory, file or library."""
    try:
        yield
    except (ImportError, MemoryError, OSError, SystemError) as error:
        # Python's own compiler raises a SystemError where it finds no memory.
        end_limited(error)


def end_limited(error: Exception) -> NoReturn:
    """End the program at once, with one line that names the error and the limits behind it."""
    first = (str(error).strip() or type(error).__name__).splitlines()[-1]
    print(
        f"lowtide: It cannot be started: {first}. Where memory or open files are limited "
        "(ulimit -v, ulimit -n) raise the limit, else install lowtide again.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)  # at once: what Python does at its end may find no memory either
