"""Who is resident, as compiled passes are told it: the struct of residency.hpp."""

from __future__ import annotations

import ctypes
from typing import ClassVar

_LONG, _DOUBLE, _P = ctypes.c_long, ctypes.c_double, ctypes.c_void_p


class ResidencyStruct(ctypes.Structure):
    """`Residency`; whoever fills it in keeps alive what it points to."""

    _fields_: ClassVar = [
        *((name, _P) for name in ("table", "owner", "free", "free_state")),
        *((name, _LONG) for name in ("num_layers", "num_experts", "num_slots")),
        ("rank", _P),
        *((name, _DOUBLE) for name in ("per_token", "per_expert", "per_share")),
        ("worth", _P),
        ("num_worth", _LONG),
        *((name, _P) for name in ("clock", "room")),
        *((name, _LONG) for name in ("most", "includes_all", "low_ids_leave")),
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
