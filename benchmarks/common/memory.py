"""Memory limits, peak memory and the page cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from lowtide.errors import PlanError, UsageError
from lowtide.hardware.memory import peak_resident_bytes, reset_peak, total_memory_bytes

__all__ = [
    "LIMITS",
    "MemoryLimit",
    "choose_limit",
    "drop_pages",
    "peak_resident_bytes",
    "reset_peak",
    "storage_read_bytes",
]

LIMITS = ("auto", "systemd", "cgroup", "balloon", "none")
CGROUP_ROOT = Path("/sys/fs/cgroup")


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
    group tree, which may be somebody else's to arrange, so it is never chosen unasked. Nor is
    `balloon`: a process that holds all memory but the limit, whoever else may want some; for a
    machine with nothing else to do. Raises UsageError for what this machine cannot do.
    """
    if wanted not in LIMITS:
        raise UsageError(f"A limit is one of {', '.join(LIMITS)}, not {wanted!r}.")
    if wanted == "none":
        return MemoryLimit("none", "none was asked for")
    if wanted == "cgroup":
        return _by_hand()
    if wanted == "balloon":
        _check_ungrouped()
        return MemoryLimit("balloon", "a process holds all memory but the limit, for everybody")
    problem = _systemd_problem()
    if problem is None:
        return MemoryLimit("systemd", "a transient scope with MemoryMax")
    if wanted == "systemd":
        raise UsageError(f"systemd-run cannot set a limit here: {problem}.")
    return MemoryLimit("none", f"systemd-run cannot set one here: {problem}")


def storage_read_bytes() -> int:
    """Bytes that this process has made the storage deliver so far, by the kernel's count."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise UsageError("This system does not count a process's reads.")


def drop_pages(folders: Iterable[Path]) -> None:
    """Drops the page cache of all files in `folders`; pages that are mapped or dirty stay."""
    for folder in folders:
        for path in sorted(folder.rglob("*")):
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
    """A group's limit would be met before the machine's, by everybody in the group."""
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
