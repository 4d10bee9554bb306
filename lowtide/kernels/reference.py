"""The expert kernels in plain torch: what every faster kernel must equal.

All write into buffers they are given and allocate nothing of size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class ExpertWeights(NamedTuple):
    """One expert's matrices, in the compute dtype."""

    gate: Tensor  # [expert_size, hidden]
    up: Tensor  # [expert_size, hidden]
    down: Tensor  # [hidden, expert_size]


def gated_mlp(x: Tensor, weights: ExpertWeights, gate: Tensor, up: Tensor, out: Tensor) -> None:
    """`out = down(silu(gate(x)) * up(x))` for x [n, hidden]; gate, up [n, expert_size] are scratch.

    Rounds where the families' own code does: after each matrix product, SiLU and product.
    """
    torch.mm(x, weights.gate.t(), out=gate)
    torch.mm(x, weights.up.t(), out=up)
    silu_times(gate, up)
    torch.mm(gate, weights.down.t(), out=out)


def silu_times(gate: Tensor, up: Tensor) -> None:
    """`gate = silu(gate) * up`, in place, rounded after each of the two."""
    F.silu(gate, inplace=True)
    gate.mul_(up)


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
