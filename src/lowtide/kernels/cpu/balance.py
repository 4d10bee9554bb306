"""Compiled twin of `policies.assignment.Balance`: one call per layer."""

from __future__ import annotations

import ctypes
from ctypes import byref
from typing import Any

import numpy as np

from lowtide.core import NO_EXPERTS, NUM_KNOWN, Assignment, Costs, Facts
from lowtide.kernels.cpu.library import functions_of

_P, _LONG, _DOUBLE, _CHAR = ctypes.c_void_p, ctypes.c_long, ctypes.c_double, ctypes.c_char
_FUNCTIONS = {"balance": (None, *6 * (_P,), _LONG, *2 * (_DOUBLE,), *2 * (_P,))}


class CompiledBalance:
    """Compiled assignment, equal to `Balance` to the last bit of every sum.

    Each engine needs its own instance, which holds an output buffer.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._balance = functions_of(library, _FUNCTIONS)["balance"]
        self._ends = (ctypes.c_int64 * 2)()
        self._costs: Costs | None = None  # of which what follows is known by number of tokens
        self._device_s = self._host_s = np.empty(0)
        self._fetch_s = 0.0

    def __call__(self, facts: Facts) -> Assignment:
        costs, demand, arriving_s = facts.costs, facts.demand, facts.arriving_s
        num = len(demand.experts)
        if not num:
            return Assignment(NO_EXPERTS, NO_EXPERTS, NO_EXPERTS)
        if costs is not self._costs:
            self._learn(costs)
        try:
            device_s, host_s = self._device_s[demand.num_tokens], self._host_s[demand.num_tokens]
        except IndexError:
            device_s, host_s = costs.device_s(demand.num_tokens), costs.at_home_s(demand.num_tokens)
        # Any: stubs do not say before Python 3.12 that an array is a buffer.
        out: Any = np.empty(num, np.int64)
        self._balance(
            demand.experts.tobytes(),
            demand.num_tokens.tobytes(),
            demand.is_resident.tobytes(),
            device_s.tobytes(),
            host_s.tobytes(),
            None if arriving_s is None else arriving_s.tobytes(),
            num,
            facts.link_s,
            self._fetch_s if facts.can_fetch else np.inf,
            byref(_CHAR.from_buffer(out)),
            self._ends,
        )
        first, second = self._ends
        return Assignment(out[:first], out[first:second], out[second:])

    def _learn(self, costs: Costs) -> None:
        counts = np.arange(NUM_KNOWN)
        self._device_s, self._host_s = costs.device_s(counts), costs.at_home_s(counts)
        self._costs, self._fetch_s = costs, costs.fetch_s
