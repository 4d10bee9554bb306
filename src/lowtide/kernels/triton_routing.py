"""Choosing, sorting and summing of experts in Triton: one launch each, no host synchronisation.

The bits are those of the plain twins in `reference.py`, except for `choose_experts` (all of a
router after its product), whose scores and weights differ in rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from lowtide.kernels.operands import ExpertChoice, SortedPairs

_BLOCK = 1024  # pairs or columns at a time
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def top_experts(rank: Tensor, num_chosen: int) -> Tensor:
    """Compute `Kernels.top_experts`."""
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


def choose_experts(
    logits: Tensor, bias: Tensor | None, choice: ExpertChoice
) -> tuple[Tensor, Tensor]:
    """Return each token's experts [tokens, num_chosen] int64, ascending, and their float32 weights.

    logits [tokens, num_experts] contiguous; bias [num_experts] float32 affects the choice and not
    the weights. Of equal ranks the first expert's or group's wins.
    """
    num_tokens, num_experts = logits.shape
    group_size = num_experts // choice.num_groups
    shape = (num_tokens, choice.num_chosen)
    experts = torch.empty(shape, dtype=torch.int64, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    _choose_experts[(num_tokens,)](
        logits,
        bias,
        experts,
        weights,
        num_experts,
        choice.num_chosen,
        choice.num_groups,
        choice.num_groups_kept,
        choice.scaling_factor,
        choice.sum_epsilon,
        IS_SIGMOID=choice.is_sigmoid,
        OF_CHOSEN=choice.of_chosen,
        NORMALISE=choice.normalise,
        ROUNDS_WEIGHTS=choice.rounds_weights or choice.of_chosen,
        NUM_GROUP_BEST=min(choice.num_group_best, group_size),
        BLOCK_G=triton.next_power_of_2(choice.num_groups),
        BLOCK_S=triton.next_power_of_2(group_size),
        num_warps=1,
    )
    return experts, weights


def sort_pairs(experts: Tensor, num_experts: int) -> SortedPairs:
    """Compute `Kernels.sort_pairs`."""
    num_pairs = experts.numel()
    token_of = torch.empty(num_pairs, dtype=torch.int64, device=experts.device)
    part_of = torch.empty_like(experts, memory_format=torch.contiguous_format)
    counts = torch.empty(num_experts, dtype=torch.int64, device=experts.device)
    # One block size, and numbers that are not specialised on: every step's size would
    # otherwise compile a kernel of its own, for half a second, when it is first seen.
    _sort_pairs[(num_experts,)](
        experts.contiguous(), token_of, part_of, counts, num_pairs, experts.shape[1], BLOCK=_BLOCK
    )
    return SortedPairs(token_of, part_of, counts)


def combine(parts: Tensor, part_of: Tensor, weights: Tensor, out: Tensor) -> None:
    """Compute `Kernels.combine`, without its scratch."""
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
    is_expert = experts < num_experts
    value = tl.load(rank + token * num_experts + experts, mask=is_expert, other=-float("inf"))
    # NaN ranks first, as in torch.
    value = tl.where(value != value, float("inf"), value.to(tl.float32))
    is_chosen = _best(value, is_expert, num_chosen, BLOCK_E)
    place = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(chosen + token * num_chosen + place, experts.to(tl.int64), mask=is_chosen)


@triton.jit
def _choose_experts(
    logits,
    bias,
    chosen,
    weights,
    num_experts,
    num_chosen,
    num_groups,
    num_groups_kept,
    scaling_factor,
    sum_epsilon,
    IS_SIGMOID: tl.constexpr,
    OF_CHOSEN: tl.constexpr,
    NORMALISE: tl.constexpr,
    ROUNDS_WEIGHTS: tl.constexpr,
    NUM_GROUP_BEST: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Choose one token's experts; each group of experts is in a block of its own."""
    token = tl.program_id(0).to(tl.int64)
    group_size = num_experts // num_groups
    places = tl.arange(0, BLOCK_G * BLOCK_S)
    group, member = places // BLOCK_S, places % BLOCK_S
    is_expert = (group < num_groups) & (member < group_size)
    experts = group * group_size + member
    logit = tl.load(logits + token * num_experts + experts, mask=is_expert, other=-float("inf"))
    # Of logits that differ by little the softmax may be the same.
    score = logit.to(tl.float32) if OF_CHOSEN else _scores(logit.to(tl.float32), IS_SIGMOID)
    if IS_SIGMOID:
        score = score.to(logit.dtype).to(tl.float32)
    rank = score
    if bias is not None:
        rank += tl.load(bias + experts, mask=is_expert, other=0.0)
    # NaN ranks first, as in torch.
    rank = tl.where(rank != rank, float("inf"), rank)
    if BLOCK_G > 1:
        rank = tl.where(is_expert, rank, -float("inf"))
        rank = _limit_to_groups(rank, num_groups, num_groups_kept, NUM_GROUP_BEST, BLOCK_G, BLOCK_S)
    is_chosen = _best(rank, is_expert, num_chosen, BLOCK_G * BLOCK_S)
    if OF_CHOSEN:
        score = _scores(tl.where(is_chosen, score, -float("inf")), IS_SIGMOID)
    weight = _weights(score, logit, is_chosen, sum_epsilon, NORMALISE, ROUNDS_WEIGHTS)
    place = token * num_chosen + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(chosen + place, experts.to(tl.int64), mask=is_chosen)
    tl.store(weights + place, weight * scaling_factor, mask=is_chosen)


@triton.jit
def _scores(logit, IS_SIGMOID: tl.constexpr):
    if IS_SIGMOID:
        return tl.div_rn(1.0, 1.0 + _exp(-logit))
    likeness = _exp(logit - tl.max(logit, 0))
    return tl.div_rn(likeness, tl.sum(likeness, 0))


@triton.jit
def _weights(
    score, logit, is_chosen, sum_epsilon, NORMALISE: tl.constexpr, ROUNDS_WEIGHTS: tl.constexpr
):
    weight = score
    if NORMALISE:
        weight = tl.div_rn(score, tl.sum(tl.where(is_chosen, score, 0.0), 0) + sum_epsilon)
    if ROUNDS_WEIGHTS:
        weight = weight.to(logit.dtype).to(tl.float32)
    return weight


@triton.jit
def _exp(x):
    # That of libdevice is torch's, too; Triton's own, which the interpreter has, is less exact.
    if _IS_INTERPRETED:
        return tl.exp(x)
    return libdevice.exp(x)


@triton.jit
def _limit_to_groups(
    rank,
    num_groups,
    num_kept,
    NUM_GROUP_BEST: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Return `rank` with -inf outside the best groups."""
    ranks = tl.reshape(rank, (BLOCK_G, BLOCK_S))
    group_rank = tl.max(ranks, 1)
    if NUM_GROUP_BEST > 1:
        members = tl.arange(0, BLOCK_S)[None, :]
        best = tl.min(tl.where(ranks == group_rank[:, None], members, BLOCK_S), 1)
        group_rank += tl.max(tl.where(members == best[:, None], -float("inf"), ranks), 1)
    groups = tl.arange(0, BLOCK_G)
    is_kept = _best(group_rank, groups < num_groups, num_kept, BLOCK_G)
    limited = tl.where(is_kept[:, None], ranks, -float("inf"))
    return tl.reshape(limited, (BLOCK_G * BLOCK_S,))


@triton.jit
def _best(rank, is_there, num_best, BLOCK: tl.constexpr):
    """Mark the highest ranks of those that exist; of equal ones the first."""
    index = tl.arange(0, BLOCK)
    is_free = is_there
    for _ in range(num_best):
        best = tl.max(tl.where(is_free, rank, -float("inf")), 0)
        first = tl.min(tl.where(is_free & (rank == best), index, BLOCK), 0)
        is_free = is_free & (index != first)
    return is_there & (is_free == 0)


@triton.jit(do_not_specialize=["num_pairs", "k"])
def _sort_pairs(experts, token_of, part_of, counts, num_pairs, k, BLOCK: tl.constexpr):
    """Sort by counting; every program places one expert's pairs, in order."""
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
