"""Page-locked host memory, which a GPU copies at the speed of its link.

The system cannot swap or move pinned bytes, and may refuse to pin more.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from lowtide.config import format_size
from lowtide.memory.arena import Arena, Region


class PinnedMemory:
    """Owns the registration of memory with CUDA. Knows nothing of its use."""

    def __init__(self, cudart: Any = None) -> None:
        """cudart: by default torch's own."""
        self._cudart = cudart or torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._ranges: list[Tensor] = []
        # Memory that is unmapped while it is registered could never be registered again.
        weakref.finalize(self, _unpin_all, self._cudart, self._ranges)

    def make_arena(self, num_bytes: int) -> Arena:
        """Make an arena, pinned unless that is refused."""
        arena = Arena(num_bytes)
        self.register(arena)
        return arena

    def register(self, region: Region) -> bool:
        """Pin a region at its exact size; return False, with a warning, if that is refused.

        All its pages become physical. It stays pinned until `close`.
        """
        return self._pin(region.bytes)

    def keep_first(self, region: Region, num_bytes: int) -> bool:
        """Pin the first bytes of a region in place of those that were; no copy may be under way.

        Returns as `register`. Copies that cross from one registered range into another fail, so
        that all of them are one.
        """
        for number, pinned in enumerate(self._ranges):
            if pinned.data_ptr() == region.bytes.data_ptr():
                self._cudart.cudaHostUnregister(pinned.data_ptr())
                del self._ranges[number]
                break
        return self._pin(region.bytes[:num_bytes])

    def holds(self, tensor: Tensor) -> bool:
        """Return True if all bytes of a contiguous tensor are in a registered range."""
        start = tensor.data_ptr()
        stop = start + tensor.nbytes
        for pinned in self._ranges:
            first = pinned.data_ptr()
            if first <= start and stop <= first + pinned.nbytes:
                return True
        return False

    def _pin(self, memory: Tensor) -> bool:
        if not memory.nbytes:
            return True
        code = int(self._cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if code == 0:
            self._ranges.append(memory)
            return True
        _forget_last_error()
        warnings.warn(
            f"{format_size(memory.nbytes)} of host memory cannot be pinned (CUDA error {code}); "
            "copies to the GPU go through a small pinned ring, at a fraction of the speed.",
            stacklevel=3,
        )
        return False

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Unpin at the end all memory registered within the context, once no copies run."""
        before = len(self._ranges)
        try:
            yield
        finally:
            _unpin_all(self._cudart, self._ranges, before)

    def close(self) -> None:
        """Unpin everything; no copy may be under way."""
        _unpin_all(self._cudart, self._ranges)


def _unpin_all(cudart: Any, ranges: list[Tensor], first: int = 0) -> None:
    while len(ranges) > first:
        cudart.cudaHostUnregister(ranges[-1].data_ptr())
        del ranges[-1]


def _forget_last_error() -> None:
    """Clear CUDA's last error, which torch would raise at the next launch."""
    if torch.cuda.is_available():
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")
