"""The expert kernels in plain torch: what every faster kernel must equal.

All write into buffers they are given and allocate nothing of size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class ExpertWeights(NamedTuple):
    """One expert's matrices, in the compute dtype."""

    gate: Tensor  # [expert_size, hidden]
    up: Tensor  # [expert_size, hidden]
    down: Tensor  # [hidden, expert_size]


class ClampedWeights(NamedTuple):
    """One expert of gpt-oss: biased, and gated by `clamped_swiglu`."""

    gate: Tensor  # [expert_size, hidden]
    up: Tensor  # [expert_size, hidden]
    down: Tensor  # [hidden, expert_size]
    gate_bias: Tensor  # [expert_size]
    up_bias: Tensor  # [expert_size]
    down_bias: Tensor  # [hidden]


CLAMP_LIMIT = 7.0
CLAMP_SLOPE = 1.702
"""Of `clamped_swiglu`; every published gpt-oss has these."""


def multiply(x: Tensor, weight_t: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """`out = x @ weight_t + bias` for x [n, in], weight_t [in, out], bias [out], out [n, out]."""
    if bias is None:
        torch.mm(x, weight_t, out=out)
    else:
        torch.addmm(bias, x, weight_t, out=out)


def gated_mlp(
    x: Tensor, weights: ExpertWeights | ClampedWeights, gate: Tensor, up: Tensor, out: Tensor
) -> None:
    """`out = down(silu(gate(x)) * up(x))` for x [n, hidden]; gate, up [n, expert_size] are scratch.

    Rounds where the families' own code does: after each matrix product, SiLU and product.
    Clamped weights make it `out = down(clamped_swiglu(gate(x), up(x)))`, every product biased.
    """
    if isinstance(weights, ClampedWeights):
        clamped_mlp(x, weights, gate, up, out, multiply)
        return
    torch.mm(x, weights.gate.t(), out=gate)
    torch.mm(x, weights.up.t(), out=up)
    silu_times(gate, up)
    torch.mm(gate, weights.down.t(), out=out)


def silu_times(gate: Tensor, up: Tensor) -> None:
    """`gate = silu(gate) * up`, in place, rounded after each of the two."""
    F.silu(gate, inplace=True)
    gate.mul_(up)


def clamped_swiglu(gate: Tensor, up: Tensor) -> None:
    """`gate = (up + 1) * gate * sigmoid(slope * gate)`, in place, of clamped inputs.

    gate is clamped from above, up on both sides; `up` is used up. gate * sigmoid(slope * gate) is
    computed as silu(slope * gate) / slope, which needs no scratch and rounds as often.
    """
    gate.clamp_(max=CLAMP_LIMIT).mul_(CLAMP_SLOPE)
    F.silu(gate, inplace=True)
    up.clamp_(-CLAMP_LIMIT, CLAMP_LIMIT).add_(1)
    gate.mul_(up).div_(CLAMP_SLOPE)


def clamped_mlp(
    x: Tensor,
    weights: ClampedWeights,
    gate: Tensor,
    up: Tensor,
    out: Tensor,
    multiply: Callable[[Tensor, Tensor, Tensor | None, Tensor], None],
) -> None:
    """`gated_mlp` of clamped weights, by the given products; rounds before and after each bias."""
    multiply(x, weights.gate.t(), None, gate)
    multiply(x, weights.up.t(), None, up)
    clamped_swiglu(gate.add_(weights.gate_bias), up.add_(weights.up_bias))
    multiply(gate, weights.down.t(), None, out)
    out.add_(weights.down_bias)


def combine(
    parts: Tensor, part_of: Tensor, weights: Tensor, term: Tensor, term_fp32: Tensor, out: Tensor
) -> None:
    """Sums each token's expert outputs in ascending expert id, in float32.

    parts [tokens * k, hidden]: expert outputs in the compute dtype; part_of [tokens, k] int64:
    the row of `parts` that holds a token's j-th expert, ascending by expert id; weights
    [tokens, k] float32 in the same order; term [tokens, hidden] compute dtype and term_fp32 are
    scratch; out [tokens, hidden] float32.

    One multiply, then one add per expert: never fused, so the bits do not depend on which
    expert's output arrived first.
    """
    out.zero_()
    for j in range(part_of.shape[1]):
        torch.index_select(parts, 0, part_of[:, j], out=term)
        term_fp32.copy_(term)
        term_fp32.mul_(weights[:, j : j + 1])
        out.add_(term_fp32)


class SortedPairs(NamedTuple):
    """The (token, expert) pairs of a step, sorted by expert, tokens ascending within one."""

    token_of: Tensor  # [tokens * k] int64: the token of each sorted pair
    part_of: Tensor  # [tokens, k] int64: where a token's j-th pair went
    counts: Tensor  # [num_experts] int64: pairs of each expert


def sort_pairs(experts: Tensor, num_experts: int) -> SortedPairs:
    """Sorts the pairs of experts [tokens, k] int64 by expert; waits for no device."""
    flat = experts.reshape(-1)
    order = torch.argsort(flat, stable=True)
    part_of = torch.empty_like(flat)
    part_of[order] = torch.arange(len(flat), device=flat.device)
    # `bincount` would look for the largest id first, on the host.
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    return SortedPairs(order // experts.shape[1], part_of.view(experts.shape), counts)


def top_experts(rank: Tensor, num_chosen: int) -> Tensor:
    """The experts of highest rank for each token: [tokens, num_chosen] int64, ascending ids.

    rank [tokens, num_experts], floating point. Which of several equal ones is chosen is left open.
    """
    return rank.topk(num_chosen, sorted=False).indices.sort().values
