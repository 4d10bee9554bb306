"""Progress reports of long work. Imports nothing, because an installation compiles with it."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Callback with a description, the units done (bytes, passes) and the total.

The text after a ": " changes as it goes, and gives these numbers in words of its own.
"""


def no_progress(what: str, done: int, total: int) -> None:
    """Ignore progress; a `Progress` that shows nothing."""
