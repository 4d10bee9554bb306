"""Confine this process to the cores of the option `cores`.

A number takes that many cores that no other lowtide process on this machine has claimed; a list
names them. The whole process is confined: existing threads and, since a thread inherits its
creator's cores, all later ones.

    keep_to(parse_cores("4"))

Imports no torch, so that a wrong value is refused at once.
"""

from __future__ import annotations

import operator
import os
import re
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from lowtide.errors import UsageError
from lowtide.files.json_file import shown

Cores = int | frozenset[int]
"""A number of cores, or a set of Linux CPU numbers."""

MAX_CPUS = 1 << 16
"""Upper bound of CPU numbers, beyond any that Linux can be built for."""

CPU_FOLDER = Path("/sys/devices/system/cpu")
_TASKS = Path("/proc/self/task")

# int() reads more than that: +4, 0_1, ٤.
_NUMBER = re.compile(r"[0-9]{1,9}")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")

_kept: tuple[Cores, list[socket.socket]] | None = None  # of the process, for its life
_usable: frozenset[int] | None = None  # CPUs usable before `look_at`


def parse_cores(given: object) -> Cores:
    """Read a number of cores or a list: `4`, `0,2-3`, [0, 2, 3]. Raises UsageError."""
    if isinstance(given, str) and _NUMBER.fullmatch(given.strip()):
        given = int(given)
    if isinstance(given, int) and not isinstance(given, bool):
        if 0 < given < MAX_CPUS:
            return given
        raise UsageError(
            f"`cores` {shown(given)} is not a number of cores; 3-3 is the core 3 alone."
        )
    try:
        if isinstance(given, str):
            return siblings_of(given)
        if isinstance(given, Sequence) and given:
            return siblings_of(",".join(str(operator.index(cpu)) for cpu in given))
    except (TypeError, ValueError):
        pass
    raise UsageError(
        f"`cores` must be a number such as 4 or a list such as 0,2-3, not {shown(given)}."
    )


def keep_to(cores: Cores) -> None:
    """Confine this process to these cores until it ends.

    Asking again for the same cores changes nothing. Raises UsageError if they are not available or
    the process is confined to others.
    """
    global _kept
    if _is_kept(cores):
        return
    usable = _usable or os.sched_getaffinity(0)
    if isinstance(cores, int):
        taken, claims = _claimed(cores, usable)
    else:
        _check_usable(cores, usable)
        taken = cores
        claims = [claim for cpu in cores if (claim := _claim(cpu)) is not None]
    _move_threads(cores, taken)
    _kept = cores, claims


def look_at(cores: Cores) -> None:
    """Confine this process to these cores for a plan, without claiming them.

    Later calls of `look_at` and `keep_to` may ask for others. Raises UsageError if the process may
    not use as many or is confined to others.
    """
    global _usable
    if _is_kept(cores):
        return
    usable = _usable or frozenset(os.sched_getaffinity(0))
    if isinstance(cores, int):
        cpus = _whole_cores_first(usable)
        if len(cpus) < cores:
            raise UsageError(f"`cores` {cores}: this process may use {len(cpus)} only.")
        chosen = frozenset(cpus[:cores])
    else:
        _check_usable(cores, usable)
        chosen = cores
    _move_threads(cores, chosen)
    _usable = usable


def _is_kept(cores: Cores) -> bool:
    """Return True if the process is confined to these; raises UsageError if to others."""
    if _kept is None:
        return False
    if _kept[0] != cores:
        raise UsageError(
            f"`cores` {_shown(cores)}: this process keeps to {_shown(_kept[0])} since its first "
            "model, for its life; open the model in a process of its own."
        )
    return True


def _check_usable(cores: frozenset[int], usable: Iterable[int]) -> None:
    if not cores <= set(usable):
        raise UsageError(
            f"`cores` {_shown(cores)}: this process may use {_shown(frozenset(usable))} only."
        )


def _move_threads(cores: Cores, taken: frozenset[int]) -> None:
    """Move all threads of this process to the given CPUs; later threads inherit them."""
    try:
        for task in _TASKS.iterdir():
            with suppress(ProcessLookupError):  # a thread that has ended meanwhile
                os.sched_setaffinity(int(task.name), taken)
    except OSError as error:  # no /proc, or a sandbox that lets no thread be moved
        raise UsageError(
            f"`cores` {_shown(cores)}: the system keeps no threads to cores here "
            f"({error.strerror}); leave `cores` out."
        ) from error


def by_core(usable: Iterable[int], folder: Path = CPU_FOLDER) -> list[frozenset[int]]:
    """Group CPUs into cores: a core with hyper-threads has several CPUs.

    folder: Linux's description of them.
    """
    left, cores = set(usable), list[frozenset[int]]()
    while left:
        core = _siblings(min(left), folder) & left
        cores.append(core)
        left -= core
    return cores


def siblings_of(text: str) -> frozenset[int]:
    """Read CPU numbers from a text such as `0,8` or `0-1`. Raises ValueError."""
    found = [_RANGE.fullmatch(part.strip()) for part in text.split(",")]
    bounds = [(int(each[1]), int(each[2] or each[1])) for each in found if each]
    if len(bounds) < len(found) or any(not low <= high < MAX_CPUS for low, high in bounds):
        raise ValueError(f"no numbers of CPUs: {text!r:.80}")
    return frozenset().union(*(range(low, high + 1) for low, high in bounds))


def _claimed(num_cores: int, usable: Iterable[int]) -> tuple[frozenset[int], list[socket.socket]]:
    """Claim `num_cores` CPUs that no other process has claimed, whole cores first."""
    cpus = _whole_cores_first(usable)
    taken, claims = list[int](), list[socket.socket]()
    for cpu in cpus:
        if len(taken) < num_cores and (claim := _claim(cpu)) is not None:
            taken.append(cpu)
            claims.append(claim)
    if len(taken) < num_cores:
        for claim in claims:
            claim.close()
        raise UsageError(
            f"`cores` {num_cores}: this process may use {len(cpus)}, and {len(cpus) - len(taken)} "
            "of them are taken by other processes of lowtide. Ask for fewer, name them in a list, "
            "or end one of those processes."
        )
    return frozenset(taken), claims


def _whole_cores_first(usable: Iterable[int]) -> list[int]:
    return [cpu for core in by_core(usable) for cpu in sorted(core)]


def _claim(cpu: int) -> socket.socket | None:
    """Claim a CPU among all processes of this machine; None if another one has it.

    The claim is a name of Linux's abstract sockets, which the system releases with the process.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0lowtide-core-{cpu}")
    except OSError:
        claim.close()
        return None
    return claim


def _siblings(cpu: int, folder: Path) -> frozenset[int]:
    """Return the CPUs of a CPU's core; only itself if the system does not tell."""
    try:
        text = (folder / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
        return siblings_of(text) | {cpu}
    except (OSError, ValueError):
        return frozenset((cpu,))


def _shown(cores: Cores) -> str:
    return str(cores) if isinstance(cores, int) else ",".join(map(str, sorted(cores)))
