"""Compiled run of one layer's experts, of which some may be absent (residency.hpp)."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lowtide.kernels.cpu.library import functions_of
from lowtide.kernels.layer_parts import Status

_INT, _LONG, _P = ctypes.c_int, ctypes.c_long, ctypes.c_void_p
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "open_foresight": (_P, _LONG),
    "close_foresight": (None, _P),
    "open_experts": (_P,),
    "close_experts": (None, _P),
    "begin_experts": (None, _P, _P, _LONG, _P, _P, _P),
    "advance_experts": (_INT, _P),
}


class Foresight:
    """Counts of a compiled pass's guesses of coming layers' demand (foresight.hpp)."""

    def __init__(self, library: ctypes.CDLL, num_layers: int) -> None:
        functions = functions_of(library, _FUNCTIONS)
        self.address: int = functions["open_foresight"](num_layers)
        weakref.finalize(self, functions["close_foresight"], self.address).atexit = False


class LayerExperts:
    """Compiled run of one layer's experts, for rows that have been routed elsewhere."""

    def __init__(self, library: ctypes.CDLL) -> None:
        functions = functions_of(library, _FUNCTIONS)
        self._begin, self._advance = functions["begin_experts"], functions["advance_experts"]
        self._run = functions["open_experts"]()
        weakref.finalize(self, functions["close_experts"], self._run).atexit = False

    def run(
        self, residents: int, layer: int, call: ctypes.Structure, experts: Tensor, weights: Tensor
    ) -> Iterator[Status]:
        """Compute the sum of the experts; yields whenever the call waits for the caller.

        residents: the address of a `Residency`; call: an `ExpertCall`. experts [tokens, k] int64,
        ascending for each token; weights [tokens, k] float32.
        """
        routing = experts.data_ptr(), weights.data_ptr()
        self._begin(self._run, residents, layer, ctypes.addressof(call), *routing)
        while status := self._advance(self._run):
            yield Status(status)
