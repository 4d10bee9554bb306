"""The compiled twin of substitution: one call decides for all tokens of a layer, one counts.

A decision at one token may take little longer than a few calls of numpy. So arrays are handed over
as bytes, which ctypes takes as they are (an array's address costs it more than copying hundreds of
bytes), and what stays from call to call is kept here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.buddies import LayerRules, LayerState, LayerTwin, Moved, MovedCount, Saved, Waits
from lowtide.core import Facts, FloatArray, IntArray, RoutedTokens
from lowtide.kernels.cpu.balance import CompiledBalance
from lowtide.kernels.cpu.library import BUDDIES, load_library

_Function = Callable[..., int]
_P, _LONG, _DOUBLE, _CHAR = ctypes.c_void_p, ctypes.c_long, ctypes.c_double, ctypes.c_char


class _Rules(ctypes.Structure):
    """As in `buddies.hpp`."""

    _fields_ = (
        ("lists", _P),
        *((name, ctypes.c_int64) for name in ("num_experts", "length", "search_rank")),
        ("exact_kinds", ctypes.c_int64),
        *((name, _DOUBLE) for name in ("temperature", "entropy", "margin", "beta")),
    )


class _Queues(ctypes.Structure):
    """As in `buddies.hpp`."""

    _fields_ = (
        *((name, ctypes.c_char_p) for name in ("queue_of", "host_s")),
        *((name, 2 * _DOUBLE) for name in ("starts_s", "each_s")),
        ("deadline_s", _DOUBLE),
    )


class CompiledBuddies:
    """Substitutes and counts as `policies.plain_buddies.PlainBuddies` does."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._replace_absent = library.lowtide_replace_absent
        self._give_up_late = library.lowtide_give_up_late
        self._give_up_beside = library.lowtide_give_up_late_beside
        self._count_moved = library.lowtide_count_moved
        state = (*4 * (_P,), _LONG, _LONG, *6 * (_P,), _LONG, _LONG)
        self._replace_absent.argtypes = (*state, _LONG, _P, _P)
        self._give_up_late.argtypes = (*state, _P, _P, _P)
        beside = (*6 * (_P,), _LONG, *4 * (_DOUBLE,), _P)
        self._give_up_beside.argtypes = (*state, *beside, _P, _P)
        self._count_moved.argtypes = (*4 * (_P,), *3 * (_LONG,), _P, _LONG, *4 * (_P,))
        self._count_saved = library.lowtide_count_saved
        self._count_saved.argtypes = (*2 * (_P,), *2 * (_LONG,), _P, _LONG, _P, _LONG, *2 * (_P,))
        self._count_saved.restype = None
        deciding = (self._replace_absent, self._give_up_late, self._give_up_beside)
        for function in (*deciding, self._count_moved):
            function.restype = _LONG
        self._deciding = deciding

    @classmethod
    def load(cls) -> CompiledBuddies:
        """Compiled now, or from the cache. Raises UnsupportedError or StorageError."""
        return cls(load_library(*BUDDIES))

    def balance(self) -> CompiledBalance:
        return CompiledBalance(self._library)

    def of_layer(self, rules: LayerRules) -> LayerTwin:
        return _Layer(rules, *self._deciding)

    def of_pass(self, owner: IntArray, num_owners: int) -> MovedCount:
        return _Count(owner, num_owners, self._count_moved, self._count_saved)


class _Layer:
    """See `LayerTwin`."""

    def __init__(
        self,
        rules: LayerRules,
        replace_absent: _Function,
        give_up_late: _Function,
        give_up_beside: _Function,
    ) -> None:
        self._lists = np.ascontiguousarray(rules.lists, np.int32)  # what `_rules` points to
        sizes = (*self._lists.shape, rules.search_rank)
        self._rules = byref(_Rules(self._lists.ctypes.data, *sizes, *rules.gates))
        self._replace_absent = replace_absent
        self._give_up_late = give_up_late
        self._give_up_beside = give_up_beside

    def replace_absent(self, state: LayerState, num_fit: int = 0) -> RoutedTokens | None:
        return self._run(self._replace_absent, state, num_fit)

    def give_up_late(self, state: LayerState, waits: Waits) -> RoutedTokens | None:
        queue_of, starts_s, each_s, host_s, deadline_s = waits
        queues = _Queues(_bytes(queue_of), _bytes(host_s), starts_s, each_s, deadline_s)
        return self._run(self._give_up_late, state, byref(queues))

    def give_up_late_beside(self, state: LayerState, facts: Facts) -> RoutedTokens | None:
        costs, (experts, num_tokens, is_resident, _) = facts.costs, facts.demand
        host_s = costs.host_s(num_tokens).tobytes()
        return self._run(
            self._give_up_beside,
            state,
            experts.tobytes(),
            num_tokens.tobytes(),
            is_resident.tobytes(),
            costs.device_s(num_tokens).tobytes(),
            costs.at_home_s(num_tokens).tobytes() if costs.disk_read_s else host_s,
            host_s,
            len(experts),
            facts.link_s,
            costs.fetch_s if facts.can_fetch else np.inf,
            costs.disk_read_s,
            costs.link_s,
            _bytes(facts.is_at_host),
        )

    def _run(self, function: _Function, state: LayerState, *last: object) -> RoutedTokens | None:
        experts, weights, kinds, is_here, arriving_s, is_open, lists, owner, left, rho = state
        if not experts.size:
            return None
        # Any: stubs do not say before Python 3.12 that an array is a buffer.
        out: Any = np.empty(experts.shape, np.int64)
        out_weights: Any = np.empty(experts.shape, np.float32)
        num_moved = function(
            self._rules,
            experts.tobytes(),
            weights.tobytes(),
            kinds.tobytes(),
            *experts.shape,
            is_here.tobytes(),
            _bytes(arriving_s),
            _bytes(is_open),
            _bytes(lists),
            _bytes(owner),
            _bytes(left),
            0 if left is None else len(left),
            rho,
            *last,
            byref(_CHAR.from_buffer(out)),
            byref(_CHAR.from_buffer(out_weights)),
        )
        return RoutedTokens(out, out_weights) if num_moved else None


class _Count:
    """See `MovedCount`."""

    def __init__(
        self,
        owner: IntArray,
        num_owners: int,
        count_moved: _Function,
        count_saved: Callable[..., None],
    ) -> None:
        self._owner = owner.tobytes()
        self._num_owners = num_owners
        self._is_affected = (ctypes.c_uint8 * max(1, len(owner)))()
        self._masses = (_DOUBLE * num_owners)()
        self._pairs, self._tokens = (ctypes.c_int64 * num_owners)(), (ctypes.c_int64 * num_owners)()
        self._count_moved, self._count_saved = count_moved, count_saved

    def __call__(self, asked: RoutedTokens, run: RoutedTokens, num_experts: int) -> Moved | None:
        is_runnable = self._count_moved(
            asked.experts.tobytes(),
            asked.weights.tobytes(),
            run.experts.tobytes(),
            run.weights.tobytes(),
            *asked.experts.shape,
            num_experts,
            self._owner,
            self._num_owners,
            self._is_affected,
            self._masses,
            self._pairs,
            self._tokens,
        )
        return Moved(self._masses[:], self._pairs[:], self._tokens[:]) if is_runnable else None

    def saved(self, asked: RoutedTokens, run: RoutedTokens, expert_bytes: FloatArray) -> Saved:
        self._count_saved(
            asked.experts.tobytes(),
            run.experts.tobytes(),
            *asked.experts.shape,
            expert_bytes.tobytes(),
            len(expert_bytes),
            self._owner,
            self._num_owners,
            self._masses,
            self._pairs,
        )
        return Saved(self._masses[:], self._pairs[:])


def _bytes(array: NDArray[Any] | None) -> bytes | None:
    return None if array is None else array.tobytes()
