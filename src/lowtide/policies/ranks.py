"""Ranks: a placement's numbers before a pass, and the moves that follow from them.

Without a device policies are not called within a pass: numbers fixed before it determine which
expert becomes resident in place of which. `admit` is the plain twin of the compiled code.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lowtide.core import NO_MOVES, BoolArray, FloatArray, IntArray, Moves

NO_LIMIT = 2**31 - 1
"""More experts than any layer has."""


class Ranks(NamedTuple):
    """Numbers that determine which absent experts may become resident, and which they replace."""

    rank: FloatArray  # [num_layers, num_experts] the placement's own memory: bumps change it
    room: IntArray  # [num_layers]: residents that each layer may have
    most: int = NO_LIMIT  # experts that may be admitted in each layer
    per_token: float = 0.0  # what the rank of a demanded expert gains for each of its tokens,
    per_expert: float = 0.0  # and once,
    per_share: float = 0.0  # and for its share of what the layer's demand is worth
    worth: FloatArray | None = None  # [n] by tokens; the last for more; None: their number
    clock: IntArray | None = None  # [1]: if given, its rank becomes the next number instead
    includes_all: bool = False  # absent experts that the pass does not demand compete, too
    low_ids_leave: bool = False  # first among residents of equal rank; else high ones
    is_forced: bool = False  # newcomers need no rank, nor a higher one than who leaves for them


def admit(
    ranks: Ranks, layer: int, experts: IntArray, num_tokens: IntArray, is_resident: BoolArray
) -> Moves:
    """Return a layer's moves for the demanded `experts`, ascending, and raise their ranks.

    Absent demanded experts are admitted by rank, lower ids first among equals, while there is free
    room or a resident of lower rank. A demanded resident may leave as well, after its use. Experts
    that are not demanded are not read: if they outrank a resident, it stays.
    """
    bump(ranks, layer, experts, num_tokens)
    is_demanded = np.zeros(len(is_resident), np.bool_)
    is_demanded[experts] = True
    moves = choose(ranks, layer, is_demanded | ranks.includes_all, is_resident)
    return of_those(moves, experts) if ranks.includes_all else moves


def bump(ranks: Ranks, layer: int, experts: IntArray, num_tokens: IntArray) -> None:
    """Raise the ranks of demanded experts."""
    rank = ranks.rank[layer]
    if ranks.clock is not None:
        rank[experts] = ranks.clock[0] + np.arange(1, len(experts) + 1)
        ranks.clock[0] += len(experts)
        return
    if ranks.per_token or ranks.per_expert:
        rank[experts] += ranks.per_token * num_tokens + ranks.per_expert
    if ranks.per_share and len(experts):
        worth = num_tokens if ranks.worth is None else ranks.worth.take(num_tokens, mode="clip")
        if (total := worth.cumsum()[-1]) > 0:  # in order, as compiled code takes it
            rank[experts] += ranks.per_share * worth / total


def choose(ranks: Ranks, layer: int, may_enter: BoolArray, is_resident: BoolArray) -> Moves:
    """Return the moves of `admit` for the ranks as they are, all admitted at once.

    may_enter [num_experts]: absent experts that are considered.
    """
    rank, room = ranks.rank[layer], int(ranks.room[layer])
    residents = is_resident.nonzero()[0]
    num_over = max(0, len(residents) - room)
    entering = (may_enter & ~is_resident & ((rank > 0) | ranks.is_forced)).nonzero()[0]
    if not num_over and not len(entering):
        return NO_MOVES
    entering = entering[(-rank[entering]).argsort(kind="stable")[: ranks.most]]
    if not ranks.low_ids_leave:
        residents = residents[::-1]
    leaving = residents[rank[residents].argsort(kind="stable")]
    num_free = max(0, room - len(residents))
    coming, going = entering[num_free:], leaving[num_over:]
    num_pairs = min(len(coming), len(going))
    # Both are sorted: the pairs in which the newcomer is worth more come first.
    is_worth = (rank[coming[:num_pairs]] > rank[going[:num_pairs]]) | ranks.is_forced
    num_swaps = np.count_nonzero(is_worth)
    return Moves(
        np.sort(entering[: num_free + num_swaps]), np.sort(leaving[: num_over + num_swaps])
    )


def of_those(moves: Moves, experts: IntArray) -> Moves:
    """Return only those of `moves` that admit one of `experts`."""
    if not len(moves.admit):
        return moves
    admit = moves.admit[np.isin(moves.admit, experts)]
    num_left_out = len(moves.admit) - len(admit)
    evict = moves.evict[num_left_out:]
    return Moves(admit, evict, num_left_out=moves.num_left_out + num_left_out)
