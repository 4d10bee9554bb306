"""What a user may have meant by a reference that names no model here."""

from __future__ import annotations

import re

_DRIVE = re.compile(r"(?P<drive>[A-Za-z]):[\\/](?P<path>.*)")


def way_out(reference: str) -> str:
    """A sentence that says what to write in its place; nothing where that is not known."""
    if drive := _DRIVE.fullmatch(reference):
        path = drive["path"].replace("\\", "/")
        return f" Under WSL that folder is /mnt/{drive['drive'].lower()}/{path}."
    return ""
