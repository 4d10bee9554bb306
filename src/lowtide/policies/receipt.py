"""What substitution did to each request: the receipt, and what a request may still have moved.

*Router mass* is the weight that the router gave; mass is moved where its expert is replaced.
Counted here alone, so that what bounds a request and what it is told are the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowtide.core import BoolArray, Facts, FloatArray, IntArray, Left, PassRows, RoutedTokens

_SLACK = 1e-9
"""Of a bound: sums of the same weights in another order differ by less."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a policy that changes words did to one request.

    A token counts once for each pass that computed it. The share of the mass is at most the
    request's `max_mass`, where there is one.
    """

    num_tokens: int  # computed in all, prompt included
    num_affected: int  # of which at least one expert was replaced, in whatever layer
    substitutions: tuple[int, ...]  # (token, expert) pairs replaced in each MoE layer
    routed_mass: float  # router weight of all pairs
    moved_mass: float  # of those replaced
    saved_bytes: int  # that would have been read or fetched for the router's own choice
    num_in_vain: int  # substitutions that saved no byte: the expert was needed or moved anyway

    @property
    def num_substituted(self) -> int:
        return sum(self.substitutions)

    @property
    def moved_share(self) -> float:
        return self.moved_mass / self.routed_mass if self.routed_mass else 0.0

    def as_dict(self) -> dict[str, object]:
        """The fields, and what follows from them."""
        fields: dict[str, object] = {name: getattr(self, name) for name in self.__slots__}
        return {
            **fields,
            "substitutions": list(self.substitutions),
            "num_substituted": self.num_substituted,
            "moved_share": self.moved_share,
        }


class _Tally:
    """A receipt in the making."""

    def __init__(self, num_layers: int) -> None:
        self.num_tokens = self.num_affected = self.num_in_vain = 0
        self.substitutions = np.zeros(num_layers, np.int64)
        self.routed_mass = self.moved_mass = self.saved_bytes = 0.0

    def receipt(self) -> Receipt:
        return Receipt(
            self.num_tokens,
            self.num_affected,
            tuple(self.substitutions.tolist()),
            self.routed_mass,
            self.moved_mass,
            round(self.saved_bytes),
            self.num_in_vain,
        )


class Receipts:
    """Owns every request's tally; is told of each layer that policies asked the routing of."""

    def __init__(self, num_layers: int, max_mass: float | None = None) -> None:
        """max_mass: replaced over routed mass of a request, at most, at any time."""
        self._num_layers = num_layers
        self._max_mass = max_mass
        self._tallies: dict[int, _Tally] = {}
        # Of the pass under way.
        self._rows: PassRows | None = None
        self._last_layer = num_layers
        self._requests: list[int] = []
        self._owner: IntArray = np.empty(0, np.int64)
        self._is_affected: BoolArray = np.empty(0, np.bool_)

    def route(self, facts: Facts, routing: RoutedTokens) -> Left:
        """Adds what a layer's router gave; what each request may have moved of it, and before."""
        self._see_pass(facts, len(routing.weights))
        routed = self._sums(routing.weights.sum(axis=1, dtype=np.float64))
        left = np.full(len(routed), np.inf)
        for place, request in enumerate(self._requests):
            tally = self._tallies[request]
            tally.routed_mass += float(routed[place])
            if self._max_mass is not None:
                allowed = self._max_mass * (1 - _SLACK) * tally.routed_mass
                left[place] = max(0.0, allowed - tally.moved_mass)
        return Left(self._owner, left)

    def substitute(self, facts: Facts, asked: RoutedTokens, run: RoutedTokens) -> None:
        """Adds what a layer runs in place of what its router chose."""
        is_moved = replaced(asked, run)
        moved = self._sums((asked.weights * is_moved).sum(axis=1, dtype=np.float64))
        pairs = self._sums(is_moved.sum(axis=1, dtype=np.float64))
        of_row = is_moved.any(axis=1)
        newly = self._sums((of_row & ~self._is_affected).astype(np.float64))
        self._is_affected |= of_row
        for place, request in enumerate(self._requests):
            tally = self._tallies[request]
            tally.moved_mass += float(moved[place])
            tally.substitutions[facts.layer] += int(pairs[place])
            tally.num_affected += int(newly[place])

    def settle(
        self, asked: RoutedTokens, run: RoutedTokens, expert_bytes: FloatArray, net_bytes: float
    ) -> None:
        """Adds what a layer's substitutions saved.

        expert_bytes [num_experts]: what the replacement of each expert saved by itself, 0 where it
        came anyway; net_bytes: what the layer as a whole did, which requests share by their pairs.
        """
        is_moved = replaced(asked, run)
        saves = expert_bytes[asked.experts] > 0
        in_vain = self._sums((is_moved & ~saves).sum(axis=1, dtype=np.float64))
        # An expert's saving is shared by the tokens that gave it up.
        num_pairs = np.bincount(asked.experts[is_moved], minlength=len(expert_bytes)).clip(1)
        of_pair = np.where(is_moved, (expert_bytes / num_pairs)[asked.experts], 0.0)
        total = float(of_pair.sum())
        shares = self._sums(of_pair.sum(axis=1)) * (net_bytes / total if total else 0.0)
        for place, request in enumerate(self._requests):
            self._tallies[request].saved_bytes += float(shares[place])
            self._tallies[request].num_in_vain += int(in_vain[place])

    def take(self, request: int) -> Receipt | None:
        """The receipt of a request that has ended; None where nothing was counted of it."""
        tally = self._tallies.pop(request, None)
        self._rows, self._last_layer = None, self._num_layers
        return None if tally is None else tally.receipt()

    def of(self, request: int) -> Receipt | None:
        """The receipt so far."""
        tally = self._tallies.get(request)
        return None if tally is None else tally.receipt()

    def all(self) -> list[Receipt]:
        """Of every request so far."""
        return [tally.receipt() for tally in self._tallies.values()]

    def take_over(self, others: Receipts) -> None:
        """Goes on with the tallies of those who counted until now."""
        self._tallies.update(others._tallies)

    def _see_pass(self, facts: Facts, num_rows: int) -> None:
        """Notices a pass's first layer: whose its rows are, none of them affected yet."""
        rows = facts.step.rows
        is_same = rows is self._rows and facts.layer > self._last_layer
        self._last_layer = facts.layer
        if is_same and len(self._owner) == num_rows:
            return
        self._rows = rows
        names, owner = np.unique(facts.step.rows_of(num_rows).request, return_inverse=True)
        self._requests, self._owner = names.tolist(), owner.astype(np.int64)
        self._is_affected = np.zeros(num_rows, np.bool_)
        counts = np.bincount(self._owner, minlength=len(names))
        for request, count in zip(self._requests, counts.tolist(), strict=True):
            tally = self._tallies.setdefault(request, _Tally(self._num_layers))
            tally.num_tokens += count

    def _sums(self, of_rows: FloatArray) -> FloatArray:
        """Of each request of the pass. of_rows [rows]"""
        sums = np.bincount(self._owner, of_rows, minlength=len(self._requests))
        return sums.astype(np.float64, copy=False)


def replaced(asked: RoutedTokens, run: RoutedTokens) -> BoolArray:
    """Which of the router's choices are not run. [tokens, k]"""
    is_run: BoolArray = (asked.experts[:, :, None] == run.experts[:, None, :]).any(axis=2)
    return ~is_run
