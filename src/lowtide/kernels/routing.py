"""Ranking and weighting of tokens' experts, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.kernels.operands import ExpertChoice


def limit_to_groups(rank: Tensor, choice: ExpertChoice) -> Tensor:
    """Return ranks [tokens, experts] with -inf outside the best groups."""
    groups = rank.view(rank.shape[0], choice.num_groups, -1)
    if choice.num_group_best == 1:
        group_rank = groups.amax(-1)  # [tokens, groups]
    else:
        num_best = min(choice.num_group_best, groups.shape[-1])
        group_rank = groups.topk(num_best, dim=-1).values.sum(-1)
    chosen = group_rank.topk(choice.num_groups_kept, dim=-1, sorted=False).indices
    excluded = torch.ones_like(group_rank, dtype=torch.bool).scatter_(1, chosen, False)
    return groups.masked_fill(excluded[:, :, None], -torch.inf).flatten(1)


def weights_of(
    scores: Tensor, experts: Tensor, choice: ExpertChoice, logits_dtype: torch.dtype
) -> Tensor:
    """Return the float32 weights [tokens, num_chosen] of chosen experts.

    scores: [tokens, experts].
    """
    weights = scores.gather(1, experts).float()
    if choice.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + choice.sum_epsilon)
    if choice.rounds_weights:
        weights = weights.to(logits_dtype).float()
    return weights * choice.scaling_factor
