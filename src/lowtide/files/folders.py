"""Where lowtide keeps files of its own."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from lowtide.errors import StorageError


def cache_folder() -> Path:
    """Lowtide's folder in the user's cache (XDG Base Directory Specification).

    Raises StorageError where there is no home that it could be in.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The specification has relative paths ignored.
    return (given if given.is_absolute() else _home("XDG_CACHE_HOME") / ".cache") / "lowtide"


def state_folder() -> Path:
    """Lowtide's folder for what a user did, such as lines typed (same specification). Raises
    StorageError as `cache_folder` does.
    """
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    home = given if given.is_absolute() else _home("XDG_STATE_HOME") / ".local" / "state"
    return home / "lowtide"


def _home(instead: str) -> Path:
    """The user's home. `instead`: the variable that does without."""
    with suppress(RuntimeError):  # such as in a container, as a user that has no name there
        if (home := Path.home()).is_absolute():  # else it would be another in every folder
            return home
    raise StorageError(f"This user has no home, where files could be kept: set HOME or {instead}.")
