"""The compiled twin of BuddyMoE's Algorithm 1: one call for all tokens of a layer."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lowtide.kernels.cpu.library import load_library

_SOURCE = Path(__file__).with_name("buddies.cpp")
_P, _LONG = ctypes.c_void_p, ctypes.c_long


class CompiledBuddies:
    """Finds buddies as `policies.buddy_search.search_buddies` does."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._find = library["lowtide_find_buddies"]
        self._find.argtypes = (*4 * (_P,), _LONG, _P, _P, _LONG, _LONG, _P, _LONG, _LONG)
        self._find.restype = None

    @classmethod
    def load(cls) -> CompiledBuddies:
        """Compiled now, or from the cache. Raises UnsupportedError or StorageError."""
        return cls(load_library(_SOURCE))

    def find(
        self,
        experts: NDArray[np.int64],
        weights: NDArray[np.float32],
        may: NDArray[np.bool_],
        lists: NDArray[np.int32],
        list_of: NDArray[np.int64] | None,
        is_here: NDArray[np.bool_],
        search_rank: int,
        rho: int,
    ) -> NDArray[np.int64]:
        """See `policies.buddy_search.BuddySearch`, whose fields these are. All contiguous."""
        out = np.empty_like(experts)
        self._find(
            experts.ctypes.data,
            weights.ctypes.data,
            may.ctypes.data,
            lists.ctypes.data,
            lists.shape[1],
            None if list_of is None else list_of.ctypes.data,
            is_here.ctypes.data,
            search_rank,
            rho,
            out.ctypes.data,
            *experts.shape,
        )
        return out
