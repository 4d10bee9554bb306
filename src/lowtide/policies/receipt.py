"""What substitution did to each request: the receipt, and what a request may still have moved.

*Router mass* is the weight that the router gave; mass is moved where its expert is replaced.
Counted here alone, so that what bounds a request and what it is told are the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowtide.buddies import BuddyTwins, MovedCount
from lowtide.core import Facts, FloatArray, IntArray, Left, PassRows, RoutedTokens
from lowtide.policies.plain_buddies import PlainBuddies
from lowtide.policies.substitution import cannot_run, check_alike

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
        self.substitutions = [0] * num_layers
        self.routed_mass = self.moved_mass = self.saved_bytes = 0.0

    def receipt(self) -> Receipt:
        return Receipt(
            self.num_tokens,
            self.num_affected,
            tuple(self.substitutions),
            self.routed_mass,
            self.moved_mass,
            round(self.saved_bytes),
            self.num_in_vain,
        )


class Receipts:
    """Owns every request's tally; is told of each layer that policies asked the routing of."""

    def __init__(
        self, num_layers: int, max_mass: float | None = None, twins: BuddyTwins | None = None
    ) -> None:
        """max_mass: replaced over routed mass of a request, at most, at any time. twins: who
        counts, the plain ones unless they are given."""
        self._num_layers = num_layers
        self._max_mass = max_mass
        self._twins = PlainBuddies() if twins is None else twins
        self._tallies: dict[int, _Tally] = {}
        # Of the pass under way.
        self._rows: PassRows | None = None
        self._last_layer = num_layers
        self._running: list[_Tally] = []  # of each owner
        self._owner: IntArray = np.empty(0, np.int64)  # [rows]
        self._owner_of_pair = self._owner  # [rows * k]
        self._count: MovedCount = self._twins.of_pass(self._owner, 0)

    def route(self, facts: Facts, routing: RoutedTokens) -> Left | None:
        """Adds what a layer's router gave; what each request may have moved of it, and before,
        where something bounds that."""
        self._see_pass(facts, *routing.weights.shape)
        weights = routing.weights.ravel()
        routed = np.bincount(self._owner_of_pair, weights, minlength=len(self._running))
        for tally, mass in zip(self._running, routed.tolist(), strict=True):
            tally.routed_mass += mass
        if self._max_mass is None:
            return None
        share = self._max_mass * (1 - _SLACK)
        left = [max(0.0, share * tally.routed_mass - tally.moved_mass) for tally in self._running]
        return Left(self._owner, np.array(left))

    def substitute(self, facts: Facts, asked: RoutedTokens, run: RoutedTokens) -> None:
        """Adds what a layer runs in place of what its router chose.

        Raises InternalError for what cannot be run.
        """
        check_alike(run, asked)
        moved = self._count(asked, run, len(facts.is_kept))
        if moved is None:
            raise cannot_run(run, len(facts.is_kept))
        for tally, mass, pairs, tokens in zip(self._running, *moved, strict=True):
            tally.moved_mass += mass
            tally.substitutions[facts.layer] += pairs
            tally.num_affected += tokens

    def settle(
        self, asked: RoutedTokens, run: RoutedTokens, expert_bytes: FloatArray, net_bytes: float
    ) -> None:
        """Adds what a layer's substitutions saved.

        expert_bytes [num_experts]: what the replacement of each expert saved by itself, 0 where it
        came anyway; net_bytes: what the layer as a whole did, which requests share by their pairs.
        """
        saved = self._count.saved(asked, run, expert_bytes)
        total = sum(saved.shares)
        scale = net_bytes / total if total else 0.0
        for tally, share, in_vain in zip(self._running, *saved, strict=True):
            tally.saved_bytes += share * scale
            tally.num_in_vain += in_vain

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

    def _see_pass(self, facts: Facts, num_rows: int, k: int) -> None:
        """Notices a pass's first layer: whose its rows are, none of them affected yet."""
        rows = facts.step.rows
        is_same = rows is self._rows and facts.layer > self._last_layer
        self._last_layer = facts.layer
        if is_same and len(self._owner) == num_rows:
            return
        self._rows = rows
        names, owner = np.unique(facts.step.rows_of(num_rows).request, return_inverse=True)
        self._owner = owner.astype(np.int64)
        self._owner_of_pair = np.repeat(self._owner, k)
        self._count = self._twins.of_pass(self._owner, len(names))
        self._running = [
            self._tallies.setdefault(name, _Tally(self._num_layers)) for name in names.tolist()
        ]
        counts = np.bincount(self._owner, minlength=len(names))
        for tally, count in zip(self._running, counts.tolist(), strict=True):
            tally.num_tokens += count
