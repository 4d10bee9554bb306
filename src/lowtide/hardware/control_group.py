"""Memory limits of the process' control groups, and the memory left below them.

The kernel kills processes of a group above its limit, so callers that need much memory check first.
Supports both versions of Linux's control groups at their usual mount points.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_UNLIMITED_BYTES = 1 << 62
"""Version 1 shows a missing limit as a number above all memory."""


class _FileNames(NamedTuple):
    """File names of one version."""

    limits: tuple[str, ...]  # where the kernel kills, and where it slows a group down
    usage: str
    cache: str  # in memory.stat: pages of files that were not used lately, dropped when need be


_V1 = _FileNames(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _FileNames(("memory.max", "memory.high"), "memory.current", "inactive_file")


_ROOT, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def group_limit_bytes(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """Return the least limit of all groups that this process is in, or None."""
    limits = [_limit_bytes(folder, names) for folder, names in _groups(root, membership)]
    return min([limit for limit in limits if limit is not None], default=None)


def group_free_bytes(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """Return the bytes that may be taken before any group of this process reaches its limit.

    Never negative; None if there are no such groups.
    """
    found = [_free_bytes(folder, names) for folder, names in _groups(root, membership)]
    known = [num_bytes for num_bytes in found if num_bytes is not None]
    return max(0, min(known)) if known else None


def _groups(root: Path, membership: Path) -> Iterator[tuple[Path, _FileNames]]:
    """Yield the process' own memory group and its visible ancestors."""
    try:
        lines = membership.read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = root, _V2
        elif "memory" in controllers.split(","):
            top, names = root / "memory", _V1
        else:
            continue
        # In a container the path may be the host's and lead nowhere; then its root stays.
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts) + 1):
            yield top.joinpath(*parts[:depth]), names


def _limit_bytes(folder: Path, names: _FileNames) -> int | None:
    limits = [_read_limit(folder / name) for name in names.limits]
    return min([limit for limit in limits if limit is not None], default=None)


def _free_bytes(folder: Path, names: _FileNames) -> int | None:
    """Return the number of bytes left in a group; None if it is not a group or has no limit."""
    limit = _limit_bytes(folder, names)
    if limit is None:
        return None
    try:
        usage = (folder / names.usage).read_text()
        stat = (folder / "memory.stat").read_text()
    except OSError:
        return None
    cache = 0
    for line in stat.splitlines():
        name, _, value = line.partition(" ")
        if name == names.cache:
            cache = int(value)
    return limit - int(usage) + cache


def _read_limit(path: Path) -> int | None:
    """Read a limit in bytes from a group's file; None if it has none or does not exist."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    if not text.isdecimal() or int(text) >= _UNLIMITED_BYTES:  # "max"
        return None
    return int(text)
