"""Compiled twin of substitution: one call decides and counts for all tokens of a layer.

For one token a decision must not take longer than a few numpy calls. Therefore arrays are passed as
bytes, which ctypes takes directly (taking an array's address costs more than copying hundreds of
bytes), and constant arguments are kept here.
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
    LayerTwin,
    Masses,
    Moved,
    PassAccount,
    Waits,
    compatibility,
)
from lowtide.core import Facts, IntArray, Left, RoutedTokens, WeightArray
from lowtide.errors import InternalError
from lowtide.kernels.cpu.balance import CompiledBalance
from lowtide.kernels.cpu.library import functions_of

_Function = Callable[..., int]
_P, _LONG, _DOUBLE, _CHAR = ctypes.c_void_p, ctypes.c_long, ctypes.c_double, ctypes.c_char
_FUNCTIONS = {
    "substitute": (_LONG, *4 * (_P,), _LONG, _LONG, *7 * (_P,)),
    "route": (_LONG, _P, _P, _LONG, _LONG, _P),
    "count_moved": (_LONG, _P, _LONG, *4 * (_P,), *3 * (_LONG,)),
}


class _Rules(ctypes.Structure):
    """`Rules` of buddies.hpp."""

    _fields_ = (
        ("lists", _P),
        *((name, ctypes.c_int64) for name in ("num_experts", "length", "layer", "rho")),
        ("exact_kinds", ctypes.c_int64),
        *((name, _DOUBLE) for name in ("entropy", "margin", "beta", "temperature")),
        ("psi", _P),
    )


class _Queues(ctypes.Structure):
    """`Queues` of buddies.hpp."""

    _fields_ = (
        *((name, ctypes.c_char_p) for name in ("queue_of", "host_s")),
        *((name, 2 * _DOUBLE) for name in ("starts_s", "each_s")),
        ("deadline_s", _DOUBLE),
    )


class CompiledBuddies:
    """Compiled substitution and counting, equal to `policies.plain_buddies.PlainBuddies`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        # Microseconds each: a thread that lets the GIL go for that may have to wait for it.
        self._library = ctypes.PyDLL(library._name, handle=library._handle)
        functions = functions_of(self._library, _FUNCTIONS)
        self._substitute, self._route, self._count_moved = functions.values()

    def balance(self) -> CompiledBalance:
        return CompiledBalance(self._library)

    def of_layer(self, rules: LayerRules) -> LayerTwin:
        return _BuddyLayer(rules, self._substitute)

    def of_pass(
        self, owner: IntArray, before: Masses, num_layers: int, share: float | None
    ) -> PassAccount:
        book = _Book(owner, before, num_layers, share)
        return _Account(book, owner, self._route, self._count_moved)


class _BuddyLayer:
    """Compiled `LayerTwin`."""

    def __init__(self, rules: LayerRules, substitute: _Function) -> None:
        # What `_rules` points to:
        self._lists = np.ascontiguousarray(rules.lists, np.int32)
        self._psi = None if rules.psi is None else np.ascontiguousarray(rules.psi, np.float64)
        sizes = (*self._lists.shape, rules.layer, rules.rho, rules.exact_kinds)
        gates = rules.entropy, rules.margin, rules.beta, rules.temperature
        psi = None if self._psi is None else self._psi.ctypes.data
        self._rules = byref(_Rules(self._lists.ctypes.data, *sizes, *gates, psi))
        self._eta = rules.eta
        self._substitute = substitute
        if rules.partition is not None:
            raise InternalError("Compiled substitutions are of one device; several have hops.")

    def __call__(
        self, facts: Facts, account: PassAccount, waits: Waits | None = None
    ) -> RoutedTokens | None:
        if not isinstance(account, _Account):
            raise InternalError(
                "A compiled decision counts in an account of its own twins' alone, not in a "
                f"{type(account).__name__}."
            )
        if facts.routing is None or not facts.routing.experts.size:
            return None
        experts, weights, _ = facts.routing
        is_here = facts.is_kept if facts.is_here is None else facts.is_here
        # Copies cost less than to say a type. Any: stubs do not say before Python 3.12 that an
        # array is a buffer.
        out: Any = experts.copy()
        out_weights: Any = weights.copy()
        num_moved = self._substitute(
            self._rules,
            experts.tobytes(),
            weights.tobytes(),
            facts.step.rows_of(len(weights)).kind.tobytes(),
            *experts.shape,
            is_here.tobytes(),
            _bytes(facts.arriving_s),
            _bytes(compatibility(facts.routing, self._eta)) if self._eta else None,
            account.reference,
            None if waits is None else byref(_queues(waits)),
            byref(_CHAR.from_buffer(out)),
            byref(_CHAR.from_buffer(out_weights)),
        )
        if num_moved < 0:
            raise InternalError(NOT_FINITE)
        return RoutedTokens(out, out_weights) if num_moved else None


class _Book(ctypes.Structure):
    """`Account` of buddies.hpp; owns the arrays that it points to."""

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
    """Compiled `PassAccount`."""

    def __init__(
        self, book: _Book, owner: IntArray, route: _Function, count_moved: _Function
    ) -> None:
        self._book, self._owner = book, owner
        self.reference = byref(book)
        self._route, self._count_moved = route, count_moved

    @property
    def masses(self) -> Masses:
        num = self._book.num_owners
        return Masses(self._book.routed[:num], self._book.moved[:num])

    @property
    def moved(self) -> Moved:
        book, num = self._book, self._book.num_owners
        pairs = [book.pairs[i * num : (i + 1) * num] for i in range(book.num_layers)]
        return Moved(pairs, book.tokens[:num], [0] * num)

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


def _queues(waits: Waits) -> _Queues:
    queue_of, starts_s, each_s, host_s, deadline_s = waits
    return _Queues(_bytes(queue_of), _bytes(host_s), starts_s, each_s, deadline_s)


def _bytes(array: NDArray[Any] | None) -> bytes | None:
    return None if array is None else array.tobytes()
