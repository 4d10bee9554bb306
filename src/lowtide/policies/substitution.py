"""Substitution: runs other experts than the router chose, where some of those are absent.

The only decision that changes a model's words. It is made between the router's demand and the
assignment. The assignment uses the substituted routing; placement and prefetch continue with the
router's demand, so that the experts it wants are brought.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np

from lowtide.buddies import NOT_FINITE, PassAccount
from lowtide.core import (
    BoolArray,
    Facts,
    FloatArray,
    IntArray,
    Left,
    RoutedTokens,
    WeightArray,
)
from lowtide.errors import InternalError


class Substitution(Protocol):
    """Chooses other experts for some tokens. Called only if a demanded expert is absent."""

    def __call__(self, facts: Facts) -> RoutedTokens | None:
        """Return the routing to run instead of `facts.routing`, or None to keep it.

        It has as many tokens and experts per token; ids ascend in each row without repeats
        (`in_order` sorts them). Its scores are ignored.
        """
        ...


class CountedSubstitution(ABC):
    """A substitution that updates the account itself, in the same call."""

    @abstractmethod
    def counted(self, facts: Facts, account: PassAccount) -> RoutedTokens | None:
        """Substitute like `Substitution`, within the account's limit; called in every layer."""


def absent_experts(facts: Facts) -> BoolArray:
    """Return the demanded experts that are neither here nor arriving, [num_experts]."""
    demand = facts.demand
    is_absent = ~stand_ins(facts)[demand.experts]
    if facts.arriving_s is not None:
        is_absent = is_absent & np.isinf(facts.arriving_s)
    absent = np.zeros(len(facts.is_kept), np.bool_)
    absent[demand.experts] = is_absent
    return absent


def stand_ins(facts: Facts) -> BoolArray:
    """Return the residents that can be used without bringing anything, [num_experts]."""
    return facts.is_kept if facts.is_here is None else facts.is_here


def in_order(experts: IntArray, weights: WeightArray) -> RoutedTokens:
    """Sort ids [tokens, k] within each row, and their weights with them."""
    order = experts.argsort(axis=1, kind="stable")
    return RoutedTokens(
        np.take_along_axis(experts, order, axis=1), np.take_along_axis(weights, order, axis=1)
    )


def check_substituted(answer: RoutedTokens, asked: RoutedTokens, num_experts: int) -> None:
    """Raise InternalError for a routing that cannot be run in place of `asked`."""
    for given, wanted in ((answer.experts, asked.experts), (answer.weights, asked.weights)):
        if given.shape != wanted.shape or given.dtype != wanted.dtype:
            raise InternalError(
                f"A substitution answered {given.dtype} {list(given.shape)} where the router chose "
                f"{wanted.dtype} {list(wanted.shape)}."
            )
    experts = answer.experts
    is_known = (experts >= 0) & (experts < num_experts)
    if not is_known.all():
        raise InternalError(
            f"A substitution answered expert {experts[~is_known][0]}; there are {num_experts}."
        )
    is_wrong = (experts[:, 1:] <= experts[:, :-1]).any(axis=1)
    if is_wrong.any():
        row = int(is_wrong.argmax())
        raise InternalError(
            f"A substitution gave token {row} the experts {experts[row].tolist()}: ids must "
            "ascend, and no expert may come twice."
        )
    if not np.isfinite(answer.weights).all():
        raise InternalError(NOT_FINITE)


def is_runnable(answer: RoutedTokens, num_experts: int) -> bool:
    """Return True if ids are known and ascend in each row, and weights are finite."""
    experts = answer.experts
    is_known = bool(((experts >= 0) & (experts < num_experts)).all())
    ascends = bool((experts[:, 1:] > experts[:, :-1]).all())
    return is_known and ascends and bool(np.isfinite(answer.weights).all())


def answer_of(routing: RoutedTokens, found: IntArray, left: Left | None) -> RoutedTokens | None:
    """Return the routing with `found` [tokens, k] in place of the router's choice.

    Replaces as much as the mass allows, keeping the replaced experts' weights; None if that is
    nothing.
    """
    is_moved = found != routing.experts
    if left is not None and not keep_within(is_moved, routing.weights, left):
        found = np.where(is_moved, found, routing.experts)
    return in_order(found, routing.weights) if is_moved.any() else None


def keep_within(is_moved: BoolArray, weights: WeightArray, left: Left) -> bool:
    """Remove from `is_moved` [tokens, k] the pairs for which a request has no mass left.

    Returns True if none was removed. Pairs are taken in order of tokens, within a token by rank.
    """
    if np.isinf(left.mass).all():
        return True
    tokens, places = is_moved.nonzero()
    masses = weights[tokens, places].astype(np.float64)
    owners = left.owner[tokens]
    if (np.bincount(owners, masses, minlength=len(left.mass)) <= left.mass).all():
        return True
    mass_left = left.mass.tolist()
    for i in np.lexsort((places, -masses, tokens)).tolist():
        if masses[i] <= mass_left[owners[i]]:
            mass_left[owners[i]] -= float(masses[i])
        else:
            is_moved[tokens[i], places[i]] = False
    return False


def router_mass(asked: RoutedTokens, num_experts: int) -> FloatArray:
    """Return the router's weight on each expert, summed over all tokens, [num_experts]."""
    mass = np.bincount(asked.experts.ravel(), asked.weights.ravel(), minlength=num_experts)
    return mass.astype(np.float64, copy=False)


def replaced(asked: RoutedTokens, run: RoutedTokens) -> BoolArray:
    """Mark the router's choices that are not run, [tokens, k]."""
    is_run: BoolArray = (asked.experts[:, :, None] == run.experts[:, None, :]).any(axis=2)
    return ~is_run
