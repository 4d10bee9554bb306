"""Holds memory, so that only a wished part of the machine's is available to other programs.

    python -m common.balloon LEFT_BYTES

Grows in steps until `LEFT_BYTES` are available, says so on one line, and holds until its standard
input ends: with the process that started it, at the latest. What is scarce then is scarce for the
page cache too, which no limit of a process's own does. If memory runs out altogether, the kernel
ends this process before any other.

Imports nothing of lowtide: what it holds should be what was asked for.
"""

from __future__ import annotations

import ctypes
import mmap
import select
import sys
from collections.abc import Callable
from pathlib import Path

STEP_BYTES = 128 << 20
TOLERANCE_BYTES = 8 << 20
_LOCK_ALL = 1 | 2  # MCL_CURRENT | MCL_FUTURE


def main() -> None:
    left_bytes = int(sys.argv[1])
    Path("/proc/self/oom_score_adj").write_text("1000")
    if memory_info("SwapTotal"):
        _lock()
    held = inflate(left_bytes, lambda: memory_info("MemAvailable"), touched, _is_wanted)
    print(sum(map(len, held)), flush=True)
    sys.stdin.buffer.read()  # until the other end is closed


def memory_info(name: str) -> int:
    """A line of /proc/meminfo, in bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise SystemExit(f"/proc/meminfo does not tell {name}.")


def inflate(
    left_bytes: int,
    available: Callable[[], int],
    take: Callable[[int], mmap.mmap],
    is_wanted: Callable[[], bool],
) -> list[mmap.mmap]:
    """Takes memory until `left_bytes` are available or it is not wanted any more.

    Others may take some meanwhile: so it looks again before every step, and a step is at most
    half of what there is above the mark. Ends the program if others give back as fast as it takes.
    """
    held: list[mmap.mmap] = []
    most_bytes = 2 * available()
    while is_wanted() and (excess_bytes := available() - left_bytes) > TOLERANCE_BYTES:
        if sum(map(len, held)) > most_bytes:
            raise SystemExit("What is available does not become less.")
        held.append(take(min(STEP_BYTES, max(TOLERANCE_BYTES, excess_bytes // 2))))
    return held


def touched(num_bytes: int) -> mmap.mmap:
    """Anonymous memory with a physical page behind each of its own."""
    memory = mmap.mmap(-1, num_bytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    for start in range(0, num_bytes, mmap.PAGESIZE):
        memory[start] = 1
    return memory


def _is_wanted() -> bool:
    """Return True while standard input is open; nothing is ever written to it."""
    return not select.select([sys.stdin], [], [], 0)[0]


def _lock() -> None:
    """Without this the kernel would swap the balloon out instead of dropping pages."""
    if ctypes.CDLL(None, use_errno=True).mlockall(_LOCK_ALL):
        raise SystemExit("There is swap, and this process may not lock memory against it.")


if __name__ == "__main__":
    main()
