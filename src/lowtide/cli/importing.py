"""Ends the program in one line where modules cannot be imported."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager

TYPE_CHECKING = False  # as in interrupts.py
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import NoReturn


@contextmanager
def imports_reported(module: str = "lowtide") -> Iterator[None]:
    """End the program with one clear line if the imports inside find no memory, file or library.

    module: the one that is imported. A module of lowtide that is not there is a fault of ours, and
    its error goes on.
    """
    try:
        yield
    except (ImportError, MemoryError, OSError, SystemError) as error:
        # Python's own compiler raises a SystemError where it finds no memory.
        if is_own_fault(error, module):
            raise
        end_limited(error, module)


def is_own_fault(error: Exception, module: str = "lowtide") -> bool:
    """Return True if code of lowtide, not an extension's, asks for a part that lowtide lacks."""
    return isinstance(error, ImportError) and _is_own(error.name or "") and _is_own(module)


def failure_text(error: Exception, module: str = "lowtide") -> str:
    """Say what cannot be loaded and the way out, without a full stop."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
    subject, remedy = "It cannot be started", "lowtide again"
    if not _is_own(module):
        subject, remedy = f"{module} cannot be loaded", "what it needs"
    elif isinstance(error, ImportError):
        subject = "A library cannot be loaded"
    return (
        f"{subject}: {reason}. Where memory or open files are limited (ulimit -v, ulimit -n) raise "
        f"the limit, else install {remedy}"
    )


def end_limited(error: Exception, module: str = "lowtide") -> NoReturn:
    """End the program at once, with one line that names the error and the way out."""
    print(f"lowtide: {failure_text(error, module)}.", file=sys.stderr, flush=True)
    os._exit(1)  # at once: what Python does at its end may find no memory either


def _is_own(module: str) -> bool:
    return module.partition(".")[0] == "lowtide"
