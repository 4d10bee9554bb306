"""Who may be believed not to replace a file: this user, and root, however it is seen from here.

In a user namespace (containers, sandboxes) users outside that have no number inside are all seen as
one, the overflow user. Root may be among them, and so may anybody else whose files are visible. So
a folder of the overflow user counts as root's only where the system's own layout says that it is
root's, and where this user is seen as the overflow user, too, no file can be told to be its own.
Whatever is not known for certain counts as another user.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

ID_MAP = Path("/proc/self/uid_map")
OVERFLOW_ID = Path("/proc/sys/kernel/overflowuid")
SYSTEM_FOLDERS = tuple(map(Path, ("/", "/home", "/tmp", "/var", "/var/tmp")))
"""Root's on every Linux: no other user can have made them, or put them in another's place."""

_USUAL_OVERFLOW_ID = 65534
_NUM_USERS = 2**32 - 1
_NUM_FIELDS = 3


class IdRange(NamedTuple):
    """Users of the namespace, and who they are outside."""

    first_inside: int
    first_outside: int
    num_ids: int


def is_own(facts: os.stat_result) -> bool:
    """Whether a file is this user's, and could not be anybody else's who is seen alike."""
    user, overflow = os.getuid(), _overflow_id()
    if user == (_USUAL_OVERFLOW_ID if overflow is None else overflow) and not _has_all_users():
        return False
    return facts.st_uid == user


def is_trusted(folder: Path, facts: os.stat_result) -> bool:
    """Whether a folder is this user's, or root's.

    Of the overflow user it is where that stands for root and for no user inside, the folder is one
    of `SYSTEM_FOLDERS`, and only the owner may rename what others have in it.
    """
    if facts.st_uid == 0 or is_own(facts):
        return True
    is_shared = facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not facts.st_mode & stat.S_ISVTX
    if is_shared or folder not in SYSTEM_FOLDERS:
        return False
    return facts.st_uid == _number_of_root_outside()


def _number_of_root_outside() -> int | None:
    """What root outside is seen as, where that is the overflow user and no user inside is."""
    number, ranges = _overflow_id(), _id_ranges()
    if number is None or any(each.first_outside == 0 and each.num_ids for each in ranges):
        return None
    if any(each.first_inside <= number < each.first_inside + each.num_ids for each in ranges):
        return None
    return number if ranges else None


def _has_all_users() -> bool:
    """Whether every user has a number of their own here: no namespace but the first, or one like
    it."""
    return sum(each.num_ids for each in _id_ranges()) >= _NUM_USERS


def _overflow_id() -> int | None:
    try:
        return int(OVERFLOW_ID.read_text())
    except (OSError, ValueError):  # another system than Linux
        return None


def _id_ranges() -> list[IdRange]:
    """None of them where they cannot be told."""
    try:
        return [_id_range(line) for line in ID_MAP.read_text().splitlines()]
    except (OSError, ValueError):
        return []


def _id_range(line: str) -> IdRange:
    fields = line.split()
    if len(fields) != _NUM_FIELDS:
        raise ValueError(f"{line!r} is no range of ids")
    return IdRange(*map(int, fields))
