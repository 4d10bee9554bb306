"""Room for connections: each is an open file, of which a process may have few.

asyncio accepts all connections that wait in one turn of its loop. Without a free descriptor it logs
an error for each, tries again a second later, and nobody is served until then. So those that may
wait are few enough for the room that is kept free.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from functools import cache

WANTED_FILES = 16 << 10

MAX_WAITING = 2048
"""Most connections that wait to be accepted."""

_TURNS = 4
"""Turns of the event loop from a connection's coming to the end of the one that it replaces."""


def raise_limit() -> None:
    """Raise this process's own limit of open files to `WANTED_FILES`, if it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_waiting() -> int:
    """Return how many connections may wait to be accepted."""
    return max(1, min(MAX_WAITING, _limit() // (4 * _TURNS)))


@cache
def max_connections() -> int:
    """Return how many connections leave room for other files, by those open at the first call."""
    try:
        num_open = len(os.listdir("/dev/fd"))
    except OSError:  # no /proc
        num_open = 0
    spare = _limit() // 4 + _TURNS * max_waiting()
    return max(1, _limit() - num_open - spare)


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED_FILES if soft == resource.RLIM_INFINITY else soft
