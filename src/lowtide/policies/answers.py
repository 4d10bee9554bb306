"""Checks answers of policies, which may be a user's own, before they are carried out.

An answer that cannot be carried out must not reach code that takes it as it is: a wrong expert
would change words, or what other experts' slots hold. Policies of lowtide's own code are held to
this by tests instead (`is_own`), since a check costs the host's thread time in each layer.
"""

from __future__ import annotations

import math

import numpy as np

from lowtide.core import Assignment, Demand, IntArray, Moves
from lowtide.errors import InternalError
from lowtide.policies.ranks import NO_LIMIT, Ranks


def is_own(*parts: object) -> bool:
    """Return True if the code of all these parts of a policy is lowtide's."""
    return all(str(getattr(part, "__module__", "")).startswith("lowtide.") for part in parts)


def check_experts(what: str, experts: object, num_experts: int) -> None:
    """Raise InternalError for expert ids that are none, or in which one comes twice."""
    if not isinstance(experts, np.ndarray) or experts.dtype.kind != "i" or experts.ndim != 1:
        raise InternalError(f"A policy {what} {experts!r:.80}, and not an array of expert ids.")
    if not len(experts):
        return
    if experts.min() < 0 or experts.max() >= num_experts:
        unknown = experts[(experts < 0) | (experts >= num_experts)]
        raise InternalError(f"A policy {what} expert {unknown[0]}; there are {num_experts}.")
    if len(experts) > 1 and np.bincount(experts).max() > 1:
        raise InternalError(f"A policy {what} experts {experts.tolist()}, one of them twice.")


def check_moves(moves: Moves, num_experts: int) -> None:
    """Raise InternalError for moves of experts that are none."""
    moved = np.concatenate((moves.admit, moves.evict))
    if len(moved) and (moved.min() < 0 or moved.max() >= num_experts):
        check_experts("admits", moves.admit, num_experts)
        check_experts("evicts", moves.evict, num_experts)


def check_assignment(assignment: object, demand: Demand) -> None:
    """Raise InternalError unless each expert that is asked for runs once, and no other."""
    if not isinstance(assignment, Assignment):
        raise InternalError(f"A policy assigned {assignment!r:.80}, which is no Assignment.")
    given, asked = np.concatenate(assignment), demand.experts
    given.sort()
    if len(given) != len(asked) or not (given == asked).all():
        raise InternalError(
            f"A policy assigned experts {given.tolist()}, and the layer asks for "
            f"{asked.tolist()}, each once."
        )


def check_ranks(ranks: object, capacity: IntArray, num_experts: int) -> None:
    """Raise InternalError for a placement's answer that cannot decide a pass.

    Compiled code takes arrays by their addresses. capacity: [num_layers], each layer's room now.
    """
    if not isinstance(ranks, Ranks):
        raise InternalError(f"A placement's begin_pass answered {ranks!r:.80}, which is no Ranks.")
    num_layers = len(capacity)
    _check_array("rank", ranks.rank, np.float64, (num_layers, num_experts))
    _check_array("room", ranks.room, np.int64, (num_layers,))
    if ranks.clock is not None:
        _check_array("clock", ranks.clock, np.int64, (1,))
    if ranks.worth is not None:
        _check_array("worth", ranks.worth, np.float64, (max(1, np.size(ranks.worth)),))
    if (ranks.room < 0).any() or ranks.room.sum() > capacity.sum():
        raise InternalError(
            f"A placement's room of layers is {ranks.room.tolist()}; there is "
            f"{capacity.tolist()}, which it may divide otherwise."
        )
    steps = (ranks.per_token, ranks.per_expert, ranks.per_share)
    if not all(isinstance(step, (int, float, np.number)) and math.isfinite(step) for step in steps):
        raise InternalError(f"A placement's ranks are raised by {steps}: give finite numbers.")
    if not (isinstance(ranks.most, int) and 0 <= ranks.most <= NO_LIMIT):
        raise InternalError(f"A placement admits at most {ranks.most!r}: give a number from 0.")


def _check_array(name: str, array: object, dtype: type, shape: tuple[int, ...]) -> None:
    if not (
        isinstance(array, np.ndarray)
        and array.dtype == dtype
        and array.shape == shape
        and array.flags.carray  # it can be changed, and lies in memory as it is read
    ):
        raise InternalError(
            f"A placement's {name} is {array!r:.80}; it is to be an array of {dtype.__name__} "
            f"{list(shape)} that can be changed."
        )
    if dtype is np.float64 and np.isnan(array).any():
        raise InternalError(f"A placement's {name} has values that are no numbers.")
