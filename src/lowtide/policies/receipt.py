"""Receipts: what substitution did to each request, and how much more it may do.

*Router mass* is the weight that the router gave an expert; it is moved if the expert is replaced.
It is counted only here, so that limits and receipts use the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lowtide.buddies import BuddyTwins, Masses, PassAccount
from lowtide.core import Facts, FloatArray, Left, PassRows, RoutedTokens
from lowtide.policies.plain_buddies import PlainBuddies
from lowtide.policies.substitution import check_substituted, replaced

_SLACK = 1e-9
"""Slack of a bound, as a share, for rounding: the same weights are added in another order."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """Effect of a policy that changes words on one request.

    A token counts once for each pass that computed it. A pass that failed because of another
    request and is run again counts once. The moved share of the mass is at most the request's
    `max_mass`, if set.
    """

    num_tokens: int  # computed in all, prompt included
    num_affected: int  # of which at least one expert was replaced, in whatever layer
    substitutions: tuple[int, ...]  # (token, expert) pairs replaced in each MoE layer
    routed_mass: float  # router weight of all pairs
    moved_mass: float  # of those replaced
    saved_bytes: int  # that would have been read or fetched for the router's own choice
    num_in_vain: int  # substitutions that saved no byte: the expert was needed or moved anyway
    num_hops: int = 0  # partitions that substitutions crossed: 0 on one device

    @classmethod
    def total(cls, receipts: Sequence[Receipt]) -> Receipt:
        """Sum the receipts of several requests."""
        sums = {
            name: sum(getattr(each, name) for each in receipts)
            for name in cls.__slots__
            if name != "substitutions"
        }
        by_layer = zip(*(each.substitutions for each in receipts), strict=True)
        return cls(substitutions=tuple(map(sum, by_layer)), **sums)

    @property
    def num_substituted(self) -> int:
        return sum(self.substitutions)

    @property
    def moved_share(self) -> float:
        return self.moved_mass / self.routed_mass if self.routed_mass else 0.0

    def as_dict(self) -> dict[str, object]:
        """Return the fields and the figures derived from them."""
        fields: dict[str, object] = {name: getattr(self, name) for name in self.__slots__}
        return {
            **fields,
            "substitutions": list(self.substitutions),
            "num_substituted": self.num_substituted,
            "moved_share": self.moved_share,
        }


@dataclass(slots=True)
class _Tally:
    """A receipt in progress."""

    substitutions: Sequence[int]  # in each layer
    num_tokens: int = 0
    num_affected: int = 0
    num_in_vain: int = 0
    num_hops: int = 0
    routed_mass: float = 0.0
    moved_mass: float = 0.0
    saved_bytes: float = 0.0

    def receipt(self) -> Receipt:
        return Receipt(
            self.num_tokens,
            self.num_affected,
            tuple(self.substitutions),
            self.routed_mass,
            self.moved_mass,
            round(self.saved_bytes),
            self.num_in_vain,
            self.num_hops,
        )


class Receipts:
    """Owns every request's tally, updated with each layer's routing."""

    def __init__(
        self, num_layers: int, max_mass: float | None = None, twins: BuddyTwins | None = None
    ) -> None:
        """Begin without accounts.

        max_mass: limit of a request's replaced over routed mass, at any time. twins: the counters,
        by default the plain ones.
        """
        self._num_layers = num_layers
        self._share = None if max_mass is None else max_mass * (1 - _SLACK)
        self._twins = PlainBuddies() if twins is None else twins
        self._tallies: dict[int, _Tally] = {}
        self._marked: dict[int, _Tally] = {}  # as they were
        # The pass under way:
        self._rows: PassRows | None = None
        self._last_layer = num_layers
        self._running: list[_Tally] = []  # of each owner
        # Their pairs, tokens and hops, as it began.
        self._before: list[tuple[Sequence[int], int, int]] = []
        self._owner = np.empty(0, np.int64)  # [rows] whose each is, as an index of `_running`
        self._account = self._twins.of_pass(self._owner, Masses([], []), 0, None)
        self._num_rows = 0

    def route(self, facts: Facts, routing: RoutedTokens) -> Left | None:
        """Add a layer's router weights; return the mass that requests may still move.

        None if there is no limit.
        """
        return self.account(facts, routing).route(routing.weights)

    def substitute(self, facts: Facts, asked: RoutedTokens, run: RoutedTokens) -> None:
        """Record the routing that runs in place of the router's choice.

        Raises InternalError for a routing that cannot be run.
        """
        check_substituted(run, asked, len(facts.is_kept))
        self._account.move(facts.layer, asked, run, len(facts.is_kept))

    def settle(
        self, asked: RoutedTokens, run: RoutedTokens, expert_bytes: FloatArray, net_bytes: float
    ) -> None:
        """Record the savings of a layer's substitutions.

        expert_bytes [num_experts]: saved by the replacement of each expert, 0 if it was brought
        anyway.
        net_bytes: saved by the whole layer, which requests share by their pairs.
        """
        is_moved = replaced(asked, run)
        owners = np.repeat(self._owner, is_moved.sum(axis=1))
        experts, num_owners = asked.experts[is_moved], len(self._running)
        num_bytes = expert_bytes[experts]
        of_pair = num_bytes / np.bincount(experts, minlength=len(expert_bytes))[experts]
        shares = np.bincount(owners, of_pair, minlength=num_owners).tolist()
        in_vain = np.bincount(owners[~(num_bytes > 0)], minlength=num_owners).tolist()
        total = sum(shares)
        scale = net_bytes / total if total else 0.0
        for tally, share, num_in_vain in zip(self._running, shares, in_vain, strict=True):
            tally.saved_bytes += share * scale
            tally.num_in_vain += num_in_vain

    def mark(self) -> None:
        """Save the counts before a pass, for `take_back`."""
        self._write_down()
        self._marked = {name: replace(tally) for name, tally in self._tallies.items()}

    def take_back(self) -> None:
        """Restore the counts of `mark`, because the pass has failed."""
        self._tallies, self._running, self._before = self._marked, [], []
        self._rows, self._last_layer = None, self._num_layers

    def take(self, request: int) -> Receipt | None:
        """Return the receipt of a request that has ended; None if nothing was counted."""
        self._write_down()
        tally = self._tallies.pop(request, None)
        self._rows, self._last_layer = None, self._num_layers
        return None if tally is None else tally.receipt()

    def all(self) -> list[Receipt]:
        """Return the receipts of all requests so far."""
        self._write_down()
        return [tally.receipt() for tally in self._tallies.values()]

    def take_over(self, others: Receipts) -> None:
        """Take over the tallies of `others`, which counted until now."""
        others._write_down()
        self._tallies.update(others._tallies)
        # Otherwise `others` would write their old counts into the tallies.
        others._running, others._before, others._rows = [], [], None

    def account(self, facts: Facts, routing: RoutedTokens) -> PassAccount:
        """Return the account of the current pass, for callers that count by themselves.

        At a pass' first layer it begins a new account, with the owners of the pass' rows.
        """
        rows, num_rows = facts.step.rows, len(routing.weights)
        is_same = rows is self._rows and facts.layer > self._last_layer
        self._last_layer = facts.layer
        if not is_same or self._num_rows != num_rows:
            self._write_down()
            self._rows, self._num_rows = rows, num_rows
            self._begin_pass(facts)
        return self._account

    def _begin_pass(self, facts: Facts) -> None:
        names, owner = np.unique(facts.step.rows_of(self._num_rows).request, return_inverse=True)
        nothing = (0,) * self._num_layers
        self._running = [self._tallies.setdefault(name, _Tally(nothing)) for name in names.tolist()]
        before = Masses(
            [tally.routed_mass for tally in self._running],
            [tally.moved_mass for tally in self._running],
        )
        self._before = [
            (tally.substitutions, tally.num_affected, tally.num_hops) for tally in self._running
        ]
        self._owner = owner.astype(np.int64)
        self._account = self._twins.of_pass(self._owner, before, self._num_layers, self._share)
        counts = np.bincount(owner, minlength=len(names))
        for tally, count in zip(self._running, counts.tolist(), strict=True):
            tally.num_tokens += count

    def _write_down(self) -> None:
        """Add the current pass' counts to every tally."""
        masses, (pairs, tokens, hops) = self._account.masses, self._account.moved
        for i, (tally, (substitutions, num_affected, num_hops)) in enumerate(
            zip(self._running, self._before, strict=True)
        ):
            tally.routed_mass, tally.moved_mass = masses.routed[i], masses.moved[i]
            tally.substitutions = [
                num + of_layer[i] for num, of_layer in zip(substitutions, pairs, strict=True)
            ]
            tally.num_affected = num_affected + tokens[i]
            tally.num_hops = num_hops + hops[i]
