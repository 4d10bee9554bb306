"""Folders for lowtide's own files."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from lowtide.errors import StorageError


def cache_folder() -> Path:
    """Return lowtide's folder in the user's cache (XDG Base Directory Specification).

    Raises StorageError if the user has no home.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The specification says to ignore relative paths.
    return (given if given.is_absolute() else _home("XDG_CACHE_HOME") / ".cache") / "lowtide"


def state_folder() -> Path:
    """Return lowtide's folder for a user's state, such as typed lines (same specification).

    Raises StorageError as `cache_folder` does.
    """
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    home = given if given.is_absolute() else _home("XDG_STATE_HOME") / ".local" / "state"
    return home / "lowtide"


def _home(instead: str) -> Path:
    """Return the user's home; `instead` names the variable to set without one."""
    with suppress(RuntimeError):  # for example in a container, as a user without a name
        if (
            home := Path.home()
        ).is_absolute():  # a relative home would depend on the current folder
            return home
    raise StorageError(f"This user has no home, where files could be kept: set HOME or {instead}.")
