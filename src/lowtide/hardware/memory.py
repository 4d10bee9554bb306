"""Memory that this process may use, and memory that it uses now."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lowtide.errors import PlanError, UsageError
from lowtide.hardware.control_group import group_free_bytes, group_limit_bytes

ADDRESS_BYTES = 1 << 30
"""Address space of the interpreter with torch, without threads' stacks."""


def total_memory_bytes() -> int:
    """Return the host memory that this process could ever have.

    It is the machine's, or the least limit of the control groups around the process.
    """
    machine_bytes, limit = _host_memory()[0], group_limit_bytes()
    return machine_bytes if limit is None else min(machine_bytes, limit)


def available_memory_bytes() -> int:
    """Return host memory that can be taken now without swapping or reaching a group's limit."""
    available_bytes = min(_host_memory()[1], total_memory_bytes())
    in_groups = group_free_bytes()
    return available_bytes if in_groups is None else min(available_bytes, in_groups)


def check_address_space() -> None:
    """Raise PlanError if a limit leaves less address space than torch takes, which would crash."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < ADDRESS_BYTES:
        raise PlanError(
            f"The address space is limited to {limit / 2**20:.0f} MiB (ulimit -v); lowtide's "
            f"libraries alone take about {ADDRESS_BYTES / 2**20:.0f} MiB. Raise the limit."
        )


def resident_bytes() -> int:
    """Return this process' physical memory."""
    import psutil

    with _reading_proc():
        return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """Return this process' peak physical memory, including mapped file pages.

    From `VmHWM`, which restarts with the program, unlike getrusage's figure. Raises UsageError if
    the system does not report it.
    """
    with _reading_proc():
        lines = Path("/proc/self/status").read_text().splitlines()
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise UsageError("This system does not report a process's peak memory.")


def reset_peak() -> None:
    """Restart `peak_resident_bytes` from the present memory."""
    with _reading_proc():
        Path("/proc/self/clear_refs").write_text("5")


@contextmanager
def _reading_proc() -> Iterator[None]:
    """Raise UsageError if /proc is missing or incomplete."""
    try:
        yield
    except _proc_errors() as reason:
        raise UsageError(
            f"This system does not report its memory: /proc cannot be read ({reason}). Mount it "
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
    """Return the machine's memory and the bytes available now."""
    try:
        import psutil
    except ImportError:  # GPU tests also run where torch alone is installed
        return _meminfo("MemTotal"), _meminfo("MemAvailable")
    with _reading_proc():
        memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def _meminfo(name: str) -> int:
    """Return a field in bytes. Raise UsageError if it is missing."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise UsageError(f"This system does not report its memory ({name}); install psutil.")
