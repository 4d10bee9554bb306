"""ctypes mirror of residency.hpp: the residency table that Python shares with C++."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

from torch import Tensor

from lowtide.kernels.cpu.library import check_layouts, functions_of
from lowtide.kernels.cpu.weight_calls import ExpertCallStruct
from lowtide.kernels.layer_parts import Status

_INT = ctypes.c_int
_LONG, _DOUBLE, _P = ctypes.c_long, ctypes.c_double, ctypes.c_void_p
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "open_experts": (_P,),
    "close_experts": (None, _P),
    "begin_experts": (None, _P, _P, _LONG, _P, _P, _P),
    "advance_experts": (_INT, _P),
}


class ResidencyStruct(ctypes.Structure):
    """`Residency` of residency.hpp; whoever fills it in keeps alive what it points to."""

    _fields_: ClassVar = [
        *((name, _P) for name in ("table", "owner", "free", "free_state")),
        *((name, _LONG) for name in ("num_experts", "num_slots")),
        ("rank", _P),
        *((name, _DOUBLE) for name in ("per_token", "per_expert", "per_share")),
        ("worth", _P),
        ("num_worth", _LONG),
        *((name, _P) for name in ("clock", "room")),
        *((name, _LONG) for name in ("most", "includes_all", "low_ids_leave", "is_forced")),
        *((name, _P) for name in ("hits", "asked", "readiness", "reader")),
        ("wait_limit_s", _DOUBLE),
        ("reads_ahead", _LONG),
        *((name, _LONG) for name in ("num_hits", "num_misses", "num_admitted", "num_left_out")),
        ("num_evicted", _LONG),
        *((name, _LONG) for name in ("read_bytes", "num_ahead", "num_late", "num_wasted")),
        ("wait_s", _DOUBLE),
        ("num_asked", _LONG),
        *((name, _LONG) for name in ("layer", "expert", "slot", "error")),
    ]


class LayerExperts:
    """Compiled run of one layer's experts, for rows that have been routed elsewhere."""

    def __init__(self, library: ctypes.CDLL) -> None:
        check_layouts(library, {"ExpertCall": ExpertCallStruct})
        functions = functions_of(library, _FUNCTIONS)
        self._begin, self._advance = functions["begin_experts"], functions["advance_experts"]
        self._run = functions["open_experts"]()
        weakref.finalize(self, functions["close_experts"], self._run).atexit = False

    def run(
        self, residents: int, layer: int, call: ExpertCallStruct, experts: Tensor, weights: Tensor
    ) -> Iterator[Status]:
        """Compute the sum of the experts; yields whenever the call waits for the caller.

        residents: the address of a `ResidencyStruct`. experts [tokens, k] int64, ascending for each
        token; weights [tokens, k] float32.
        """
        routing = experts.data_ptr(), weights.data_ptr()
        self._begin(self._run, residents, layer, ctypes.addressof(call), *routing)
        while status := self._advance(self._run):
            yield Status(status)
