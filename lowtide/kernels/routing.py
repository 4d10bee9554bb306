"""Routing kernels, chosen by where the tensors are: Triton's on a GPU that has it, else torch's.

Both give the same bits, so the choice is nobody's business.
"""

from __future__ import annotations

import functools
import importlib.util

from torch import Tensor

from lowtide.kernels import reference
from lowtide.kernels.reference import SortedPairs


@functools.cache
def has_triton() -> bool:
    """Whether this torch came with Triton."""
    return importlib.util.find_spec("triton") is not None


def top_experts(rank: Tensor, num_chosen: int) -> Tensor:
    """See `reference.top_experts`."""
    if rank.is_cuda and has_triton():
        from lowtide.kernels import triton_routing

        return triton_routing.top_experts(rank, num_chosen)
    return reference.top_experts(rank, num_chosen)


def sort_pairs(experts: Tensor, num_experts: int) -> SortedPairs:
    """See `reference.sort_pairs`."""
    if experts.is_cuda and has_triton():
        from lowtide.kernels import triton_routing

        return triton_routing.sort_pairs(experts, num_experts)
    return reference.sort_pairs(experts, num_experts)


def combine(
    parts: Tensor, part_of: Tensor, weights: Tensor, term: Tensor, term_fp32: Tensor, out: Tensor
) -> None:
    """See `reference.combine`."""
    if parts.is_cuda and has_triton():
        from lowtide.kernels import triton_routing

        triton_routing.combine(parts, part_of, weights, out)
    else:
        reference.combine(parts, part_of, weights, term, term_fp32, out)
