"""Choosing, sorting and summing up experts in Triton: one launch each, no host synchronisation.

The bits are those of the plain twins in `reference.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.kernels.reference import SortedPairs

_BLOCK = 1024  # pairs or columns at a time


def top_experts(rank: Tensor, num_chosen: int) -> Tensor:
    """As `reference.top_experts`."""
    num_tokens, num_experts = rank.shape
    experts = torch.empty((num_tokens, num_chosen), dtype=torch.int64, device=rank.device)
    _top_experts[(num_tokens,)](
        rank.contiguous(),
        experts,
        num_experts,
        num_chosen,
        BLOCK_E=triton.next_power_of_2(num_experts),
        num_warps=1,
    )
    return experts


def sort_pairs(experts: Tensor, num_experts: int) -> SortedPairs:
    """As `reference.sort_pairs`."""
    num_pairs = experts.numel()
    token_of = torch.empty(num_pairs, dtype=torch.int64, device=experts.device)
    part_of = torch.empty_like(experts, memory_format=torch.contiguous_format)
    counts = torch.empty(num_experts, dtype=torch.int64, device=experts.device)
    # A block of one size, and numbers that are not specialised on: every step's size would
    # otherwise compile a kernel of its own, for half a second, when it is first seen.
    _sort_pairs[(num_experts,)](
        experts.contiguous(), token_of, part_of, counts, num_pairs, experts.shape[1], BLOCK=_BLOCK
    )
    return SortedPairs(token_of, part_of, counts)


def combine(parts: Tensor, part_of: Tensor, weights: Tensor, out: Tensor) -> None:
    """As `reference.combine`, without its scratch."""
    num_tokens, hidden = out.shape
    block = min(_BLOCK, triton.next_power_of_2(hidden))
    # Each product is rounded before it is added: a fused one would differ in the last bit.
    _combine[(num_tokens, triton.cdiv(hidden, block))](
        parts,
        part_of,
        weights.contiguous(),
        out,
        hidden,
        part_of.shape[1],
        BLOCK_H=block,
        enable_fp_fusion=False,
    )


@triton.jit
def _top_experts(rank, chosen, num_experts, num_chosen, BLOCK_E: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    is_free = experts < num_experts
    value = tl.load(rank + token * num_experts + experts, mask=is_free, other=-float("inf"))
    # Not a number ranks first, as in torch.
    value = tl.where(value != value, float("inf"), value.to(tl.float32))
    for _ in range(num_chosen):
        best = tl.max(tl.where(is_free, value, -float("inf")), 0)
        first = tl.min(tl.where(is_free & (value == best), experts, BLOCK_E), 0)
        is_free = is_free & (experts != first)
    is_chosen = (experts < num_experts) & (is_free == 0)
    place = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(chosen + token * num_chosen + place, experts.to(tl.int64), mask=is_chosen)


@triton.jit(do_not_specialize=["num_pairs", "k"])
def _sort_pairs(experts, token_of, part_of, counts, num_pairs, k, BLOCK: tl.constexpr):
    """A counting sort in which every program places one expert's pairs, in order."""
    expert = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    num_before = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_pairs, BLOCK):
        pairs = first + offsets
        one = tl.load(experts + pairs, mask=pairs < num_pairs, other=expert)
        num_before += (one < expert).to(tl.int32)
    start = tl.sum(num_before, 0)
    end = start
    for first in range(0, num_pairs, BLOCK):
        pairs = first + offsets
        one = tl.load(experts + pairs, mask=pairs < num_pairs, other=-1)
        is_own = one == expert
        place = end + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(token_of + place, (pairs // k).to(tl.int64), mask=is_own)
        tl.store(part_of + pairs, place.to(tl.int64), mask=is_own)
        end += tl.sum(is_own.to(tl.int32), 0)
    tl.store(counts + expert, (end - start).to(tl.int64))


@triton.jit
def _combine(parts, part_of, weights, out, hidden, k, BLOCK_H: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_column = columns < hidden
    total = tl.zeros((BLOCK_H,), tl.float32)
    for j in range(k):
        part = tl.load(part_of + token * k + j)
        weight = tl.load(weights + token * k + j)
        term = tl.load(parts + part * hidden + columns, mask=is_column, other=0.0)
        total = total + term.to(tl.float32) * weight
    tl.store(out + token * hidden + columns, total, mask=is_column)
