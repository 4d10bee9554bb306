"""Routing kernels, chosen by where the tensors are: Triton's on a GPU that has it, else torch's.

Both give the same bits, so the choice is nobody's business. Layers that have Triton kernels of
their own choose by `is_for_triton`, too; those differ in rounding alone.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from lowtide.kernels import reference
from lowtide.kernels.reference import SortedPairs


@functools.cache
def why_no_triton(device: torch.device) -> str | None:
    """Why Triton's kernels cannot be used on a GPU; None where they can.

    Triton builds a part of itself with a C compiler, into a cache folder, when it is first used:
    the first call tries that out.
    """
    if importlib.util.find_spec("triton") is None:
        return "this torch has no Triton"
    try:
        from lowtide.kernels import triton_routing

        triton_routing.sort_pairs(torch.zeros((1, 1), dtype=torch.int64, device=device), 1)
    except Exception as error:  # whatever may be missing there
        return f"Triton fails with {type(error).__name__}: {error}"
    return None


def is_for_triton(tensor: Tensor) -> bool:
    """Whether what is done with `tensor` is Triton's: it is on a GPU that has it."""
    return tensor.is_cuda and why_no_triton(tensor.device) is None


def top_experts(rank: Tensor, num_chosen: int) -> Tensor:
    """See `reference.top_experts`."""
    if is_for_triton(rank):
        from lowtide.kernels import triton_routing

        return triton_routing.top_experts(rank, num_chosen)
    return reference.top_experts(rank, num_chosen)


def sort_pairs(experts: Tensor, num_experts: int) -> SortedPairs:
    """See `reference.sort_pairs`."""
    if is_for_triton(experts):
        from lowtide.kernels import triton_routing

        return triton_routing.sort_pairs(experts, num_experts)
    return reference.sort_pairs(experts, num_experts)


def combine(
    parts: Tensor, part_of: Tensor, weights: Tensor, term: Tensor, term_fp32: Tensor, out: Tensor
) -> None:
    """See `reference.combine`."""
    if is_for_triton(parts):
        from lowtide.kernels import triton_routing

        triton_routing.combine(parts, part_of, weights, out)
    else:
        reference.combine(parts, part_of, weights, term, term_fp32, out)
