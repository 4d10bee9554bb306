"""Memory that a process may use, and what it uses now."""

from __future__ import annotations

from pathlib import Path

from lowtide.errors import UsageError
from lowtide.hardware.control_group import group_free_bytes, group_limit_bytes


def total_memory_bytes() -> int:
    """Host memory that this process could ever have: the machine's, or its job's by the least
    limit of the control groups around it."""
    machine_bytes, limit = _host_memory()[0], group_limit_bytes()
    return machine_bytes if limit is None else min(machine_bytes, limit)


def available_memory_bytes() -> int:
    """Host memory that can be taken now without swapping, or meeting a control group's limit."""
    available_bytes = min(_host_memory()[1], total_memory_bytes())
    in_groups = group_free_bytes()
    return available_bytes if in_groups is None else min(available_bytes, in_groups)


def resident_bytes() -> int:
    """Physical memory of this process."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """The most physical memory this process has had, file pages that it mapped included.

    From `VmHWM`: unlike getrusage's figure it starts again with the program. Raises UsageError
    where the system does not tell.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise UsageError("This system does not report a process's peak memory.")


def reset_peak() -> None:
    """Lets `peak_resident_bytes` start again from what the process holds now."""
    Path("/proc/self/clear_refs").write_text("5")


def _host_memory() -> tuple[int, int]:
    """Bytes of the machine, and those available now."""
    try:
        import psutil
    except ImportError:  # GPU tests also run where torch alone is installed
        return _meminfo("MemTotal"), _meminfo("MemAvailable")
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
