"""Algorithm 1 of BuddyMoE: for absent experts of each token, the first buddies that are here.

`search_buddies` is the plain twin, as the paper writes it down: token by token, rank by rank. The
compiled one is `kernels/cpu/buddies.cpp`, within a layer's whole decision.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.core import BoolArray, IntArray, WeightArray

UNBOUNDED = 1 << 30
"""Substitutions of a token, or ranks of a list, where nothing limits them."""


class BuddySearch(NamedTuple):
    """What is searched: all arrays contiguous.

    A token's ranks are its experts by descending weight, ties by ascending id.
    """

    experts: IntArray  # [tokens, k], ascending in each row
    weights: WeightArray  # [tokens, k]
    may: BoolArray  # [tokens, k]: which of them are to be replaced, if a buddy is there
    lists: NDArray[np.int32]  # [lists, length] buddies, best first; -1 behind the last
    list_of: IntArray | None  # [tokens, k] the list of each; None: an expert's own id is its list's
    is_here: BoolArray  # [num_experts]: who may stand in
    search_rank: int  # H: how far down a list to look
    rho: int  # substitutions per token, at most


def search_buddies(search: BuddySearch) -> IntArray:
    """Which expert runs in place of each of `search.experts`; itself where none does. [tokens, k]

    The sequential order over ranks, which is the reference: no expert comes twice for a token, not
    even one that was replaced.
    """
    found = search.experts.copy()
    tokens = np.flatnonzero(search.may.any(axis=1))
    if not len(tokens) or search.rho < 1:
        return found
    ranks = np.argsort(-search.weights[tokens], axis=1, kind="stable")
    is_here = search.is_here.tolist()
    for token, order in zip(tokens.tolist(), ranks.tolist(), strict=True):
        _substitute_token(search, token, order, is_here, found[token])
    return found


def _substitute_token(
    search: BuddySearch, token: int, order: list[int], is_here: list[bool], found: IntArray
) -> None:
    """The paper's lines 11 to 20, with a budget of `rho`."""
    may = search.may[token].tolist()
    in_use = set(search.experts[token].tolist())
    num_left = search.rho
    for place in order:
        if not may[place]:
            continue
        for buddy in _list(search, token, place):
            if buddy < 0:
                break
            if is_here[buddy] and buddy not in in_use:
                found[place] = buddy
                in_use.add(buddy)
                num_left -= 1
                break
        if not num_left:
            return


def _list(search: BuddySearch, token: int, place: int) -> list[int]:
    """The buddies of one pair, as far as they are looked at."""
    one = search.experts if search.list_of is None else search.list_of
    buddies: list[int] = search.lists[one[token, place], : search.search_rank].tolist()
    return buddies
