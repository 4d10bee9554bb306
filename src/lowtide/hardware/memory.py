"""Memory that a process may use, and what it uses now."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lowtide.errors import PlanError, UsageError
from lowtide.hardware.control_group import group_free_bytes, group_limit_bytes

ADDRESS_BYTES = 1 << 30
"""Virtual memory of the interpreter with torch, threads' stacks left out."""


def total_memory_bytes() -> int:
    """Return the host memory that this process could ever have.

    It is the machine's, or the least limit of the control groups around the process.
    """
    machine_bytes, limit = _host_memory()[0], group_limit_bytes()
    return machine_bytes if limit is None else min(machine_bytes, limit)


def available_memory_bytes() -> int:
    """Host memory that can be taken now without swapping, or meeting a control group's limit."""
    available_bytes = min(_host_memory()[1], total_memory_bytes())
    in_groups = group_free_bytes()
    return available_bytes if in_groups is None else min(available_bytes, in_groups)


def check_address_space() -> None:
    """Raises PlanError where a limit leaves less than torch takes, which then ends the process."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < ADDRESS_BYTES:
        raise PlanError(
            f"The address space is limited to {limit / 2**20:.0f} MiB (ulimit -v); lowtide's "
            f"libraries alone take about {ADDRESS_BYTES / 2**20:.0f} MiB. Raise the limit."
        )


def resident_bytes() -> int:
    """Physical memory of this process."""
    import psutil

    with _told_by_proc():
        return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """The most physical memory this process has had, file pages that it mapped included.

    From `VmHWM`: unlike getrusage's figure it starts again with the program. Raises UsageError
    where the system does not tell.
    """
    with _told_by_proc():
        lines = Path("/proc/self/status").read_text().splitlines()
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise UsageError("This system does not report a process's peak memory.")


def reset_peak() -> None:
    """Lets `peak_resident_bytes` start again from what the process holds now."""
    with _told_by_proc():
        Path("/proc/self/clear_refs").write_text("5")


@contextmanager
def _told_by_proc() -> Iterator[None]:
    """Raises UsageError where /proc, which tells it, is missing or gives nothing."""
    try:
        yield
    except _proc_errors() as reason:
        raise UsageError(
            f"This system does not tell its memory: /proc cannot be read ({reason}). Mount it "
            "(mount -t proc proc /proc), or start the container with it."
        ) from reason


def _proc_errors() -> tuple[type[BaseException], ...]:
    told = (OSError, KeyError, IndexError, ValueError)
    try:
        import psutil
    except ImportError:  # GPU tests also run where torch alone is installed
        return told
    return (*told, psutil.Error)


def _host_memory() -> tuple[int, int]:
    """Bytes of the machine, and those available now."""
    try:
        import psutil
    except ImportError:  # GPU tests also run where torch alone is installed
        return _meminfo("MemTotal"), _meminfo("MemAvailable")
    with _told_by_proc():
        memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def _meminfo(name: str, path: Path = Path("/proc/meminfo")) -> int:
    """Bytes. Raises UsageError where the system does not tell."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise UsageError(f"This system does not tell its memory ({name}); install psutil.")
