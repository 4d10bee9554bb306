"""Where lowtide keeps files of its own."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """lowtide's folder in the user's cache (XDG Base Directory Specification)."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The specification has relative paths ignored.
    return (given if given.is_absolute() else Path.home() / ".cache") / "lowtide"


def state_folder() -> Path:
    """lowtide's folder for what a user did, such as lines typed (same specification)."""
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    home = given if given.is_absolute() else Path.home() / ".local" / "state"
    return home / "lowtide"
