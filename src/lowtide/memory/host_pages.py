"""Host memory as address ranges that are mapped once and made physical on demand.

The mechanism under `arena.py`, by Python's `mmap`: private anonymous mappings, and advice to the
kernel about their pages.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import sys
from contextlib import suppress

import torch
from torch import Tensor

from lowtide.core import align_up
from lowtide.errors import InternalError, PageError, PlanError, UnsupportedError

HUGE_PAGE_BYTES = 2 << 20

# Linux's numbers, which Python's `mmap` does not name in every version.
_MAP_NORESERVE = 0x4000
_MADV_POPULATE_WRITE = 23  # since Linux 5.14


class HostMapping:
    """`num_bytes` of zeroed anonymous memory, starting on a huge-page boundary.

    Its addresses live until the last tensor or array over it is gone.
    """

    def __init__(self, num_bytes: int, has_huge_pages: bool, is_promised: bool) -> None:
        """is_promised: the system refuses at once more than it can ever hold."""
        # The kernel aligns a mapping to 4 KiB only, so one huge page more is reserved (never
        # touched) and the range starts at the first boundary inside.
        reserved = align_up(max(num_bytes, 1), mmap.PAGESIZE) + HUGE_PAGE_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0 if is_promised else _MAP_NORESERVE)
        try:
            self._map = mmap.mmap(-1, reserved, flags=flags)
        except (OSError, OverflowError) as error:
            raise PlanError(
                f"The system refuses to reserve {num_bytes} bytes of host memory: {error}. "
                "Lower `host_memory` or `context`."
            ) from error
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._start = -address % HUGE_PAGE_BYTES
        whole = num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        # Only whole huge pages inside the range: the tail must not grow past its own bytes.
        if whole and hasattr(mmap, "MADV_HUGEPAGE"):
            advice = mmap.MADV_HUGEPAGE if has_huge_pages else mmap.MADV_NOHUGEPAGE
            with suppress(OSError):  # a kernel without huge pages refuses either advice
                self.advise(advice, 0, whole)
        self.bytes: Tensor = torch.frombuffer(
            self._map, dtype=torch.uint8, count=max(num_bytes, 1), offset=self._start
        )[:num_bytes]

    def advise(self, advice: int, start: int, stop: int) -> None:
        """Advise the kernel about bytes `start` to `stop`. Raises OSError."""
        self._map.madvise(advice, self._start + start, stop - start)


class HostPages:
    """Pages of host memory: an address range reserved without memory.

    A committed group is physical and zero; a released one takes no memory. Groups are whole huge
    pages if those are wanted, so that the kernel never has to fill a part of one.
    """

    def __init__(self, num_bytes: int, group_bytes: int = HUGE_PAGE_BYTES) -> None:
        """group_bytes: whole pages; huge pages are used if it is a multiple of their size.

        Raises PlanError if there are too few addresses, UnsupportedError on systems other than
        Linux.
        """
        if not sys.platform.startswith("linux"):
            raise UnsupportedError(f"Memory that moves needs Linux, not {sys.platform}.")
        if group_bytes % mmap.PAGESIZE:
            raise InternalError(
                f"Groups of {group_bytes} bytes are not whole pages of {mmap.PAGESIZE} bytes."
            )
        self.group_bytes = group_bytes
        self.num_bytes = align_up(num_bytes, group_bytes)
        has_huge_pages = group_bytes % HUGE_PAGE_BYTES == 0
        self._mapping = HostMapping(self.num_bytes, has_huge_pages, is_promised=False)
        self.bytes = self._mapping.bytes

    def commit(self, start: int, stop: int) -> None:
        """Make bytes `start` to `stop`, whole groups without memory, physical.

        Raises PageError if the system refuses; none of them is physical then.
        """
        try:
            self._populate(start, stop)
        except OSError as error:
            self.release(start, stop)  # pages that were already populated
            raise PageError(
                f"The system refuses {stop - start} bytes of host memory: {error}. Free memory "
                "that other programs hold, or lower `host_memory`."
            ) from error

    def release(self, start: int, stop: int) -> None:
        """Return the memory of bytes `start` to `stop`, whole groups, to the system at once.

        A later write would bring pages back, uncounted.
        """
        self._mapping.advise(mmap.MADV_DONTNEED, start, stop)

    def close(self) -> None:
        """Release all memory; the addresses stay as long as a tensor over them."""
        if self.num_bytes:
            self.release(0, self.num_bytes)

    def _populate(self, start: int, stop: int) -> None:
        """Populate pages in one call, several times as fast as touching small pages."""
        try:
            self._mapping.advise(_MADV_POPULATE_WRITE, start, stop)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.bytes[start : stop : mmap.PAGESIZE] = 0  # for kernels without this advice
