"""How what takes long tells how far it is. Imports nothing: an installation compiles by it."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with what is being done, the units done (bytes, passes) and the units in all. What stands
behind a ": " changes as it goes, and says these numbers in words of its own."""


def no_progress(what: str, done: int, total: int) -> None:
    """The `Progress` that shows nothing."""
