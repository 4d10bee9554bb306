"""Algorithm 1 of BuddyMoE in Triton: one program per token, ranks in order.

The paper gives each of a token's experts a thread and claims buddies by compare-and-swap. Here
one program walks the ranks and looks at all of a list at once: nothing races, and the result is
the sequential one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def find_buddies(
    experts: Tensor,
    weights: Tensor,
    may: Tensor,
    lists: Tensor,
    list_of: Tensor | None,
    is_here: Tensor,
    search_rank: int,
    rho: int,
) -> Tensor:
    """As `policies.buddy_search.search_buddies`: who runs in place of each expert. [tokens, k]

    experts [tokens, k] int64, ascending; weights float32; may bool; lists [lists, length] int32;
    list_of [tokens, k] int64 or None; is_here [num_experts] bool. All contiguous.
    """
    num_tokens, k = experts.shape
    out = torch.empty_like(experts)
    _find_buddies[(num_tokens,)](
        experts,
        weights,
        may,
        lists,
        list_of,
        is_here,
        out,
        k,
        lists.shape[1],
        search_rank,
        rho,
        BLOCK_K=triton.next_power_of_2(k),
        BLOCK_L=triton.next_power_of_2(lists.shape[1]),
        num_warps=1,
    )
    return out


@triton.jit(do_not_specialize=["k", "length", "search_rank", "rho"])
def _find_buddies(
    experts,
    weights,
    may,
    lists,
    list_of,
    is_here,
    out,
    k,
    length,
    search_rank,
    rho,
    BLOCK_K: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * k
    places, ranks = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_L)
    is_place = places < k
    own = tl.load(experts + first + places, mask=is_place, other=-1)
    weight = tl.load(weights + first + places, mask=is_place, other=-float("inf"))
    is_wanted = tl.load(may + first + places, mask=is_place, other=0) != 0
    found = own
    is_left = is_place
    num_left = rho
    for _ in range(k):
        best = tl.max(tl.where(is_left & (weight == weight), weight, -float("inf")), 0)
        place = tl.min(tl.where(is_left & (weight == best), places, BLOCK_K), 0)
        # Weights that are no numbers come last.
        place = tl.where(place < BLOCK_K, place, tl.min(tl.where(is_left, places, BLOCK_K), 0))
        is_left = is_left & (places != place)
        is_it = places == place
        expert = tl.sum(tl.where(is_it, own, 0), 0)
        may_it = tl.max((is_it & is_wanted).to(tl.int32), 0)
        number = expert
        if list_of is not None:
            number = tl.load(list_of + first + place)
        is_rank = (ranks < length) & (ranks < search_rank) & (may_it > 0) & (num_left > 0)
        buddy = tl.load(lists + number * length + ranks, mask=is_rank, other=-1).to(tl.int64)
        is_one = is_rank & (buddy >= 0)
        here = tl.load(is_here + buddy, mask=is_one, other=0) != 0
        # Own experts and those found: together all that the token has, or had.
        clash = (buddy[None, :] == own[:, None]) | (buddy[None, :] == found[:, None])
        in_use = tl.max(clash.to(tl.int32), 0)
        is_free = is_one & here & (in_use == 0)
        rank = tl.min(tl.where(is_free, ranks, BLOCK_L), 0)
        taken = tl.sum(tl.where(ranks == rank, buddy, 0), 0)
        is_found = rank < BLOCK_L
        found = tl.where(is_it & is_found, taken, found)
        num_left -= is_found.to(tl.int32)
    tl.store(out + first + places, found, mask=is_place)
