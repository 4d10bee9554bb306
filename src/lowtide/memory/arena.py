"""One range of host memory, reserved once, on huge pages where they pay.

The pages under a buffer decide what a disk read into it costs: huge pages reach two to three
times the speed of 4 KiB pages (docs/log.md). Knows nothing of what is stored in it.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtide.core import align_up
from lowtide.errors import PlanError

HUGE_PAGE_BYTES = 2 << 20


class Arena:
    """`num_bytes` of zeroed anonymous memory, starting on a huge-page boundary.

    Pages become physical when they are first touched: with `grows_slowly` small ones, for what is
    filled in many places a little at a time. The memory lives until the last tensor or array over
    it is gone.
    """

    def __init__(self, num_bytes: int, grows_slowly: bool = False) -> None:
        self.num_bytes = num_bytes
        # The kernel aligns a mapping to 4 KiB only, so one huge page more is reserved (never
        # touched) and the range starts at the first boundary inside.
        reserved = align_up(max(num_bytes, 1), mmap.PAGESIZE) + HUGE_PAGE_BYTES
        try:
            self._map = mmap.mmap(-1, reserved, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise PlanError(
                f"The system refuses to reserve {num_bytes} bytes of host memory: {error}. "
                "Lower --host-memory or --context."
            ) from error
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._start = -address % HUGE_PAGE_BYTES
        whole = num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        # Only whole huge pages inside the range: the tail must not grow past its own bytes.
        if whole and hasattr(mmap, "MADV_HUGEPAGE"):
            advice = mmap.MADV_NOHUGEPAGE if grows_slowly else mmap.MADV_HUGEPAGE
            with suppress(OSError):  # a kernel without huge pages refuses either advice
                self._map.madvise(advice, self._start, whole)
        self.bytes: Tensor = torch.frombuffer(
            self._map, dtype=torch.uint8, count=max(num_bytes, 1), offset=self._start
        )[:num_bytes]

    def array(self) -> NDArray[np.uint8]:
        """The whole range as a numpy array of bytes (shared, not copied)."""
        array: NDArray[np.uint8] = self.bytes.numpy()
        return array

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of `shape` and `dtype` over the bytes from `offset`."""
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        return self.bytes[offset : offset + num_bytes].view(dtype).view(shape)
