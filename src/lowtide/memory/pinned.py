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
from lowtide.memory.arena import Arena


class PinnedMemory:
    """Owns the registration of arenas with CUDA. Knows nothing of their use."""

    def __init__(self, cudart: Any = None) -> None:
        """cudart: by default torch's own."""
        self._cudart = cudart or torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._arenas: list[Arena] = []
        # Memory that is unmapped while it is registered could never be registered again.
        weakref.finalize(self, _unpin_all, self._cudart, self._arenas)

    def make_arena(self, num_bytes: int) -> Arena:
        """Make an arena, pinned unless that is refused."""
        arena = Arena(num_bytes)
        self.register(arena)
        return arena

    def register(self, arena: Arena) -> bool:
        """Pin an arena at its exact size; return False, with a warning, if that is refused.

        All its pages become physical. It stays pinned until `close`.
        """
        if not arena.num_bytes:
            return True
        code = int(self._cudart.cudaHostRegister(arena.bytes.data_ptr(), arena.num_bytes, 0))
        if code == 0:
            self._arenas.append(arena)
            return True
        _forget_last_error()
        warnings.warn(
            f"{format_size(arena.num_bytes)} of host memory cannot be pinned (CUDA error {code}); "
            "copies to the GPU go through a small pinned ring, at a fraction of the speed.",
            stacklevel=2,
        )
        return False

    def holds(self, tensor: Tensor) -> bool:
        """Return True if all bytes of a contiguous tensor are in a registered arena."""
        start = tensor.data_ptr()
        stop = start + tensor.nbytes
        return any(
            first <= start and stop <= first + arena.num_bytes
            for arena in self._arenas
            for first in (arena.bytes.data_ptr(),)
        )

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Unpin at the end all arenas registered within the context, once no copies run."""
        before = len(self._arenas)
        try:
            yield
        finally:
            _unpin_all(self._cudart, self._arenas, before)

    def close(self) -> None:
        """Unpin everything; no copy may be under way."""
        _unpin_all(self._cudart, self._arenas)


def _unpin_all(cudart: Any, arenas: list[Arena], first: int = 0) -> None:
    while len(arenas) > first:
        cudart.cudaHostUnregister(arenas[-1].bytes.data_ptr())
        del arenas[-1]


def _forget_last_error() -> None:
    """Clear CUDA's last error, which torch would raise at the next launch."""
    if torch.cuda.is_available():
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")
