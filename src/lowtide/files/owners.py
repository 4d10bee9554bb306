"""Who may be believed not to replace a file: this user, and root, however it is seen from here.

In a user namespace (containers, sandboxes) users outside that have no number inside are all seen as
one, the overflow user; where root is among them, so are its folders. Whatever is not known for
certain counts as somebody else.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

ID_MAP = Path("/proc/self/uid_map")
OVERFLOW_ID = Path("/proc/sys/kernel/overflowuid")
_NUM_FIELDS = 3


class IdRange(NamedTuple):
    """Users of the namespace, and who they are outside."""

    first_inside: int
    first_outside: int
    num_ids: int


def is_trusted(facts: os.stat_result) -> bool:
    """Whether a folder is this user's, or root's.

    Of the overflow user it is where that stands for root and for nobody inside, and nobody but the
    owner may rename what others have in it: whom else it may stand for was let in by whoever made
    the namespace.
    """
    if facts.st_uid in (0, os.getuid()):
        return True
    is_shared = facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not facts.st_mode & stat.S_ISVTX
    return not is_shared and facts.st_uid == _number_of_root_outside()


def _number_of_root_outside() -> int | None:
    """What root outside is seen as, where that is the overflow user and nobody else is."""
    try:
        number = int(OVERFLOW_ID.read_text())
        ranges = [_id_range(line) for line in ID_MAP.read_text().splitlines()]
    except (OSError, ValueError):  # another system than Linux
        return None
    if any(each.first_outside == 0 and each.num_ids for each in ranges):
        return None
    if any(each.first_inside <= number < each.first_inside + each.num_ids for each in ranges):
        return None
    return number if ranges else None


def _id_range(line: str) -> IdRange:
    fields = line.split()
    if len(fields) != _NUM_FIELDS:
        raise ValueError(f"{line!r} is no range of ids")
    return IdRange(*map(int, fields))
