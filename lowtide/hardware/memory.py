"""Memory that a process may use, and what it uses now."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def total_memory_bytes() -> int:
    """Host memory that this process could ever have: the machine's, or its cgroup's limit."""
    total = int(psutil.virtual_memory().total)
    for path in _CGROUP_LIMITS:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            total = min(total, int(text))
    return total


def available_memory_bytes() -> int:
    """Host memory that can be taken now without swapping."""
    return min(int(psutil.virtual_memory().available), total_memory_bytes())


def resident_bytes() -> int:
    """Physical memory of this process."""
    return int(psutil.Process().memory_info().rss)
