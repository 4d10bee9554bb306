"""Ranking: the experts of most worth, and the moves that keep them."""

from __future__ import annotations

import numpy as np

from lowtide.core import NO_MOVES, BoolArray, FloatArray, IntArray, Moves


def top(rank: IntArray | FloatArray, candidates: BoolArray, count: int) -> IntArray:
    """The `count` candidates with the highest rank; lower ids win ties."""
    experts = candidates.nonzero()[0]
    order = (-rank[experts]).argsort(kind="stable")
    return experts[order[:count]]


def favourites(worth: FloatArray, count: int) -> IntArray:
    """The `count` experts of most worth, ascending; lower ids win ties."""
    return np.sort((-worth).argsort(kind="stable")[:count])


def moves_to(target: IntArray, is_kept: BoolArray) -> Moves:
    """From the present residents to exactly those in `target`."""
    is_target = np.zeros(len(is_kept), np.bool_)
    is_target[target] = True
    return Moves(
        admit=(is_target > is_kept).nonzero()[0],
        evict=(is_kept > is_target).nonzero()[0],
    )


def best_kept(score: FloatArray, candidates: BoolArray, is_kept: BoolArray, count: int) -> IntArray:
    """The `count` candidates with the highest score; residents, then lower ids, win ties."""
    residents, others = is_kept.nonzero()[0], (candidates > is_kept).nonzero()[0]
    experts = np.concatenate((residents, others))
    order = (-score[experts]).argsort(kind="stable")
    return experts[order[:count]]


def exchange(
    entering: IntArray,
    leaving: IntArray,
    entering_worth: FloatArray | IntArray,
    worth: FloatArray | IntArray,
    num_free: int,
) -> Moves:
    """Admits the best of `entering`, each for a free slot or for a resident that is worth less.

    `entering` best first with `entering_worth`; `leaving`: residents that may go, least `worth`
    first.
    """
    rest = entering[num_free:]
    num_pairs = min(len(rest), len(leaving))
    is_better = entering_worth[num_free : num_free + num_pairs] > worth[leaving[:num_pairs]]
    # Both sides are sorted, so the pairs that pay come first.
    num_swaps = np.count_nonzero(is_better)
    admit, evict = entering[: num_free + num_swaps].copy(), leaving[:num_swaps].copy()
    admit.sort()
    evict.sort()
    return Moves(admit, evict)


def at_most(room: int, worth: FloatArray | IntArray, is_kept: BoolArray) -> Moves:
    """Evicts those of least worth, lower ids first, where more are kept than there is room for."""
    num_over = int(np.count_nonzero(is_kept)) - room
    if num_over <= 0:
        return NO_MOVES
    residents = is_kept.nonzero()[0]
    leaving = residents[worth[residents].argsort(kind="stable")[:num_over]]
    return Moves(NO_MOVES.admit, np.sort(leaving))
