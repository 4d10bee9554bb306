"""The compiled twin of substitution: one call decides for all tokens of a layer and counts.

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

from lowtide.buddies import (
    NOT_FINITE,
    LayerRules,
    LayerState,
    LayerTwin,
    Masses,
    Moved,
    PassAccount,
    Saved,
    Waits,
)
from lowtide.core import Facts, FloatArray, IntArray, Left, RoutedTokens, WeightArray
from lowtide.errors import InternalError
from lowtide.kernels.cpu.balance import CompiledBalance
from lowtide.kernels.cpu.library import BUDDIES, load_library

_Function = Callable[..., int]
_P, _LONG, _DOUBLE, _CHAR = ctypes.c_void_p, ctypes.c_long, ctypes.c_double, ctypes.c_char


class _Rules(ctypes.Structure):
    """As in `buddies.hpp`."""

    _fields_ = (
        ("lists", _P),
        *((name, ctypes.c_int64) for name in ("num_experts", "length", "search_rank")),
        *((name, ctypes.c_int64) for name in ("layer", "exact_kinds")),
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
        # Microseconds each: a thread that lets the GIL go for that may have to wait for it.
        self._library = library = ctypes.PyDLL(library._name, handle=library._handle)
        self._count_saved = library.lowtide_count_saved
        self._count_saved.argtypes = (*2 * (_P,), *2 * (_LONG,), _P, _LONG, _P, _LONG, *2 * (_P,))
        self._count_saved.restype = None
        library.lowtide_route.argtypes = (_P, _P, _LONG, _LONG, _P)
        library.lowtide_count_moved.argtypes = (_P, _LONG, *4 * (_P,), *3 * (_LONG,))
        state = (*4 * (_P,), _LONG, _LONG, *5 * (_P,), _LONG, _LONG, _P)
        more = {
            "lowtide_replace_absent": (_LONG,),
            "lowtide_give_up_late": (_P,),
            "lowtide_give_up_late_alone": (_P, _P, _LONG, _DOUBLE),
            "lowtide_give_up_late_beside": (*6 * (_P,), _LONG, *4 * (_DOUBLE,), _P),
        }
        for name, types in more.items():
            getattr(library, name).argtypes = (*state, *types, _P, _P)
        self._deciding = tuple(_answers_long(getattr(library, name)) for name in more)
        counting = library.lowtide_route, library.lowtide_count_moved
        self._route, self._count_moved = map(_answers_long, counting)

    @classmethod
    def load(cls) -> CompiledBuddies:
        """Compiled now, or from the cache. Raises UnsupportedError or StorageError."""
        return cls(load_library(*BUDDIES))

    def balance(self) -> CompiledBalance:
        return CompiledBalance(self._library)

    def of_layer(self, rules: LayerRules) -> LayerTwin:
        return _BuddyLayer(rules, *self._deciding)

    def of_pass(
        self, owner: IntArray, before: Masses, num_layers: int, share: float | None
    ) -> PassAccount:
        book = _Book(owner, before, num_layers, share)
        return _Account(book, owner, self._route, self._count_moved, self._count_saved)


class _BuddyLayer:
    """See `LayerTwin`."""

    def __init__(
        self,
        rules: LayerRules,
        replace_absent: _Function,
        give_up_late: _Function,
        give_up_alone: _Function,
        give_up_beside: _Function,
    ) -> None:
        self._lists = np.ascontiguousarray(rules.lists, np.int32)  # what `_rules` points to
        sizes = (*self._lists.shape, rules.search_rank, rules.layer)
        self._rules = byref(_Rules(self._lists.ctypes.data, *sizes, *rules.gates))
        self._replace_absent = replace_absent
        self._give_up_late = give_up_late
        self._give_up_alone = give_up_alone
        self._give_up_beside = give_up_beside

    def replace_absent(self, state: LayerState, num_fit: int = 0) -> RoutedTokens | None:
        return self._run(self._replace_absent, state, num_fit)

    def give_up_late(self, state: LayerState, waits: Waits) -> RoutedTokens | None:
        queue_of, starts_s, each_s, host_s, deadline_s = waits
        queues = _Queues(_bytes(queue_of), _bytes(host_s), starts_s, each_s, deadline_s)
        return self._run(self._give_up_late, state, byref(queues))

    def give_up_late_alone(self, state: LayerState, facts: Facts) -> RoutedTokens | None:
        costs, demand = facts.costs, facts.demand
        resident_s = costs.device_s(demand.num_tokens).tobytes()
        asked = demand.is_resident.tobytes(), resident_s, len(demand.experts)
        return self._run(self._give_up_alone, state, *asked, costs.fetch_s)

    def give_up_late_beside(self, state: LayerState, facts: Facts) -> RoutedTokens | None:
        costs, (experts, num_tokens, is_resident) = facts.costs, facts.demand
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
        experts, weights, kinds, is_here, arriving_s, lists, owner, left, rho, own = state
        if own is not None and not isinstance(own, _Account):
            raise InternalError(
                "A compiled decision counts in an account of its own twins' alone, not in a "
                f"{type(own).__name__}."
            )
        if not experts.size:
            return None
        # Copies cost less than to say a type. Any: stubs do not say before Python 3.12 that an
        # array is a buffer.
        out: Any = experts.copy()
        out_weights: Any = weights.copy()
        num_moved = function(
            self._rules,
            experts.tobytes(),
            weights.tobytes(),
            kinds.tobytes(),
            *experts.shape,
            is_here.tobytes(),
            None if arriving_s is None else arriving_s.tobytes(),
            None if lists is None else lists.tobytes(),
            None if owner is None else owner.tobytes(),
            None if left is None else left.tobytes(),
            0 if left is None else len(left),
            rho,
            None if own is None else own.reference,
            *last,
            byref(_CHAR.from_buffer(out)),
            byref(_CHAR.from_buffer(out_weights)),
        )
        if num_moved < 0:
            raise InternalError(NOT_FINITE)
        return RoutedTokens(out, out_weights) if num_moved else None


class _Book(ctypes.Structure):
    """As `Account` in `buddies.hpp`; owns what it points to."""

    _fields_ = (
        ("owner", ctypes.c_char_p),
        ("num_owners", ctypes.c_int64),
        ("share", _DOUBLE),
        *((name, ctypes.POINTER(_DOUBLE)) for name in ("routed", "moved")),
        *((name, ctypes.POINTER(ctypes.c_int64)) for name in ("pairs", "tokens")),
        ("is_affected", ctypes.POINTER(ctypes.c_uint8)),
    )

    def __init__(
        self, owner: IntArray, before: Masses, num_layers: int, share: float | None
    ) -> None:
        num = len(before.routed)
        sums, counts = num * _DOUBLE, num * ctypes.c_int64
        super().__init__(
            owner.tobytes(),
            num,
            np.inf if share is None else share,
            sums(*before.routed),
            sums(*before.moved),
            (num_layers * num * ctypes.c_int64)(),
            counts(),
            (len(owner) * ctypes.c_uint8)(),
        )
        self.num_layers = num_layers


class _Account:
    """See `PassAccount`."""

    def __init__(
        self,
        book: _Book,
        owner: IntArray,
        route: _Function,
        count_moved: _Function,
        count_saved: Callable[..., None],
    ) -> None:
        self._book, self._owner = book, owner
        self.reference = byref(book)
        self._route, self._count_moved, self._count_saved = route, count_moved, count_saved
        num = book.num_owners
        self._shares, self._in_vain = (num * _DOUBLE)(), (num * ctypes.c_int64)()

    @property
    def masses(self) -> Masses:
        num = self._book.num_owners
        return Masses(self._book.routed[:num], self._book.moved[:num])

    @property
    def moved(self) -> Moved:
        book, num = self._book, self._book.num_owners
        pairs = [book.pairs[i * num : (i + 1) * num] for i in range(book.num_layers)]
        return Moved(pairs, book.tokens[:num])

    def route(self, weights: WeightArray) -> Left | None:
        left = (self._book.num_owners * _DOUBLE)()
        if not self._route(self.reference, weights.tobytes(), *weights.shape, left):
            return None
        return Left(self._owner, np.array(left[:]))

    def move(self, layer: int, asked: RoutedTokens, run: RoutedTokens, num_experts: int) -> bool:
        return bool(
            self._count_moved(
                self.reference,
                layer,
                asked.experts.tobytes(),
                asked.weights.tobytes(),
                run.experts.tobytes(),
                run.weights.tobytes(),
                *asked.experts.shape,
                num_experts,
            )
        )

    def saved(self, asked: RoutedTokens, run: RoutedTokens, expert_bytes: FloatArray) -> Saved:
        self._count_saved(
            asked.experts.tobytes(),
            run.experts.tobytes(),
            *asked.experts.shape,
            expert_bytes.tobytes(),
            len(expert_bytes),
            self._owner.tobytes(),
            self._book.num_owners,
            self._shares,
            self._in_vain,
        )
        return Saved(self._shares[:], self._in_vain[:])


def _answers_long(function: Any) -> _Function:
    function.restype = _LONG
    typed: _Function = function
    return typed


def _bytes(array: NDArray[Any] | None) -> bytes | None:
    return None if array is None else array.tobytes()
