"""Memory limits, peak memory and the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self
from unittest.mock import patch

import numpy as np
import psutil

from lowtide.engine.planning import plan as planning
from lowtide.errors import PlanError, UsageError
from lowtide.hardware.memory import peak_resident_bytes, reset_peak, total_memory_bytes

__all__ = [
    "LIMITS",
    "MOST_MOVED",
    "MemoryLimit",
    "RoomWatch",
    "cached_share",
    "choose_limit",
    "division_kept",
    "drop_pages",
    "moved_share",
    "peak_resident_bytes",
    "reset_peak",
    "room_bytes",
    "storage_read_bytes",
]


def division_kept() -> AbstractContextManager[Any]:
    """Have models that are loaded meanwhile keep the planned division of their budgets."""
    return patch.object(planning, "max_cache_tokens", lambda planner, made: 0)


LIMITS = ("auto", "systemd", "cgroup", "balloon", "none")
CGROUP_ROOT = Path("/sys/fs/cgroup")

MOST_MOVED = 0.05
"""Largest share by which a limit may move while answers are timed."""
_SAMPLE_S = 0.2


class MemoryLimit(NamedTuple):
    """A way to run commands under a memory limit that counts their page cache too."""

    kind: str  # "systemd", "cgroup v2", "cgroup v1", "balloon" or "none"
    reason: str

    @contextmanager
    def limited(self, command: Sequence[str], num_bytes: int) -> Iterator[list[str]]:
        """The command to run in place of `command`, while the limit stands."""
        if self.kind == "systemd":
            yield [*_SYSTEMD_RUN, f"--property=MemoryMax={num_bytes}", "--", *command]
        elif self.kind == "none":
            yield list(command)
        elif self.kind == "balloon":
            with _balloon(num_bytes):
                yield list(command)
        else:
            group = _make_group(_own_group(self.kind), self.kind, num_bytes)
            try:
                yield [
                    "sh",
                    "-c",
                    'echo $$ > "$0" && exec "$@"',
                    str(group / "cgroup.procs"),
                    *command,
                ]
            finally:
                _remove(group)


def choose_limit(wanted: str) -> MemoryLimit:
    """`wanted`: one of `LIMITS`. `auto` asks systemd and otherwise sets none.

    `cgroup` makes a group below this process's own, by hand: it needs write access to the control
    group tree, which may be arranged by another program, so it is never chosen unasked. Nor is
    `balloon`: a process that holds all memory but the limit, which other programs then lack; for
    a machine with nothing else to do. Raises UsageError for what this machine cannot do.
    """
    if wanted not in LIMITS:
        raise UsageError(f"A limit is one of {', '.join(LIMITS)}, not {wanted!r}.")
    if wanted == "none":
        return MemoryLimit("none", "none was asked for")
    if wanted == "cgroup":
        return _by_hand()
    if wanted == "balloon":
        _check_ungrouped()
        return MemoryLimit("balloon", "a process holds all memory but the limit")
    problem = _systemd_problem()
    if problem is None:
        return MemoryLimit("systemd", "a transient scope with MemoryMax")
    if wanted == "systemd":
        raise UsageError(f"systemd-run cannot set a limit here: {problem}.")
    return MemoryLimit("none", f"systemd-run cannot set one here: {problem}")


def room_bytes() -> int:
    """Memory that this process and the files it reads can have at the moment.

    What is available, file pages included, and what it holds itself that no file has: it does not
    change when this process takes or frees memory, but when others do.
    """
    own_bytes = sum(_status_bytes(name) for name in ("RssAnon", "RssShmem", "VmPTE"))
    return own_bytes + int(psutil.virtual_memory().available)


class RoomWatch:
    """Samples `room_bytes` in a thread while it is entered."""

    def __init__(self) -> None:
        self._samples: list[int] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def least_bytes(self) -> int:
        return min(self._samples)

    @property
    def most_bytes(self) -> int:
        return max(self._samples)

    def _sample(self) -> None:
        self._samples.append(room_bytes())
        while not self._is_over.wait(_SAMPLE_S):
            self._samples.append(room_bytes())


def moved_share(limit_bytes: int, least_bytes: int, most_bytes: int) -> float:
    """Return the largest distance of free memory from a limit, as a share of the limit."""
    return max(abs(each - limit_bytes) for each in (least_bytes, most_bytes)) / limit_bytes


def cached_share(path: Path, ranges: Iterable[tuple[int, int]]) -> float:
    """Return the share of a file's byte ranges (start, stop) that is in the page cache.

    Raises OSError where the kernel does not say.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    mapped = np.memmap(path, np.uint8, mode="r")
    flags = np.empty(-(-len(mapped) // mmap.PAGESIZE), np.uint8)  # a page's lowest bit says it
    if libc.mincore(mapped.ctypes.data, len(mapped), flags.ctypes.data):
        raise OSError(ctypes.get_errno(), "mincore", str(path))
    pages = [
        flags[start // mmap.PAGESIZE : -(-stop // mmap.PAGESIZE)] & 1 for start, stop in ranges
    ]
    return float(np.concatenate(pages).mean())


def _status_bytes(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise UsageError(f"This system does not report a process's {name}.")


def storage_read_bytes() -> int:
    """Bytes that this process has made the storage deliver so far, by the kernel's count."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise UsageError("This system does not count a process's reads.")


def drop_pages(paths: Iterable[Path]) -> None:
    """Drops the page cache of files and of all files in folders; pages that are mapped stay."""
    for top in paths:
        for path in (top, *sorted(top.rglob("*"))):
            if path.is_file():
                _drop_file(path)


def _drop_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(descriptor)  # only clean pages can be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


_SYSTEMD_RUN = ("systemd-run", "--scope", "--quiet", "--user")


def _systemd_problem() -> str | None:
    """Why a scope of the user's own cannot be made; None when it can."""
    if shutil.which("systemd-run") is None:
        return "it is not installed"
    try:
        subprocess.run(
            [*_SYSTEMD_RUN, "--property=MemoryMax=1G", "--", "true"],
            capture_output=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(getattr(error, "stderr", b"").decode(errors="replace").strip() or error)
    return None


def _by_hand() -> MemoryLimit:
    is_v2 = (CGROUP_ROOT / "cgroup.controllers").exists()
    kind = "cgroup v2" if is_v2 else "cgroup v1"
    group = _own_group(kind)
    if not os.access(group, os.W_OK):
        raise UsageError(f"{group} cannot be written to; choose another limit than cgroup.")
    return MemoryLimit(kind, f"a group of its own below {group}")


@contextmanager
def _balloon(left_bytes: int) -> Iterator[None]:
    """Meanwhile `left_bytes` of the machine's memory are available.

    Raises UsageError where they cannot be made so, PlanError if what ran took more: the balloon
    then burst, and the limit stood no longer.
    """
    command = [sys.executable, str(Path(__file__).with_name("balloon.py")), str(left_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as balloon:
        assert balloon.stdin is not None and balloon.stdout is not None
        held = balloon.stdout.readline()
        if not held:
            raise UsageError("The balloon could not be filled (see above); choose another limit.")
        yield
        if balloon.poll() is not None:
            raise PlanError(
                f"What ran took more than the {left_bytes} bytes that a balloon of {int(held)} "
                "bytes had left, and burst it: the limit did not stand. Raise the limit."
            )


def _check_ungrouped() -> None:
    """A group's limit would be met before the machine's, by all processes in the group."""
    if total_memory_bytes() < psutil.virtual_memory().total:
        raise UsageError("This process's group has a memory limit already: take --limit none.")


def _own_group(kind: str) -> Path:
    """The folder of this process's memory control group."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if kind == "cgroup v2" and not controllers:
            return CGROUP_ROOT / path.lstrip("/")
        if kind == "cgroup v1" and "memory" in controllers.split(","):
            return CGROUP_ROOT / "memory" / path.lstrip("/")
    raise UsageError(f"This process is in no memory group of {kind}; choose another limit.")


def _make_group(parent: Path, kind: str, num_bytes: int) -> Path:
    group = parent / f"lowtide-benchmark-{uuid.uuid4().hex[:12]}"
    name = "memory.max" if kind == "cgroup v2" else "memory.limit_in_bytes"
    group.mkdir()
    try:
        (group / name).write_text(str(num_bytes))
    except OSError as error:
        group.rmdir()
        raise UsageError(
            f"{group / name} refuses a limit of {num_bytes} bytes: {error}."
        ) from error
    return group


def _remove(group: Path) -> None:
    """Removes an empty group: its processes have ended, and their memory goes with it."""
    group.rmdir()
