"""Routers: which experts a token goes to, and with what weights. Never dependent on placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lowtide.experts.rows import Routing
from lowtide.kernels.products import REFERENCE, Products
from lowtide.kernels.routing import is_for_triton, top_experts
from lowtide.layers.batch import Segment
from lowtide.memory.workspace import Buffers


class Router(Protocol):
    """Chooses each token's experts."""

    def route(self, x: Tensor, segments: Sequence[Segment], workspace: Buffers) -> Routing:
        """For x [rows, hidden] in the compute dtype. Never depends on placement."""
        ...


@dataclass(frozen=True, slots=True)
class SigmoidRouter:
    """Sigmoid scores with a selection-only bias (LLaDA2, Ling 2.0; DeepSeek-V3's `noaux_tc`).

    scores = sigmoid(x W^T) in float32. Experts are chosen by score + bias, restricted either to
    the best groups (a group ranks by the sum of its two best) or, with `capacity`, to the experts
    that rank best in the token's routing window (LLaDA2.2: the maximum over the window's tokens).
    Their weights are the scores without bias, normalised over the chosen and scaled.
    """

    weight: Tensor  # [num_experts, hidden] float32
    bias: Tensor | None  # [num_experts] float32
    num_experts_per_token: int
    num_groups: int
    num_groups_per_token: int
    capacity: int  # experts per routing window; 0: group-limited routing instead
    window_tokens: int
    normalise: bool
    scaling_factor: float

    def route(self, x: Tensor, segments: Sequence[Segment], workspace: Buffers) -> Routing:
        num_rows, num_experts = x.shape[0], self.weight.shape[0]
        # Scores, ranks, masks and top-k results: small, and without `out=` forms.
        workspace.library("router", 6 * 4 * num_rows * num_experts)
        with workspace.scope():
            x_fp32 = workspace.take("router input", tuple(x.shape), torch.float32)
            x_fp32.copy_(x)
            logits = torch.mm(x_fp32, self.weight.t())
        if not self.capacity and is_for_triton(logits):
            return self._choose_by_triton(logits)
        scores = logits.sigmoid_()
        rank = scores if self.bias is None else scores + self.bias
        if self.capacity:
            rank = self._limit_to_windows(rank, segments)
        elif self.num_groups > 1:
            rank = self._limit_to_groups(rank)
        experts = top_experts(rank, self.num_experts_per_token)
        weights = scores.gather(1, experts)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(experts, weights * self.scaling_factor)

    def _choose_by_triton(self, logits: Tensor) -> Routing:
        from lowtide.kernels.triton_routing import ExpertChoice, choose_experts

        choice = ExpertChoice(
            self.num_experts_per_token,
            is_sigmoid=True,
            normalise=self.normalise,
            num_groups=self.num_groups,
            num_groups_kept=self.num_groups_per_token,
            num_group_best=2,
            scaling_factor=self.scaling_factor,
        )
        return Routing(*choose_experts(logits, self.bias, choice))

    def _limit_to_groups(self, rank: Tensor) -> Tensor:
        groups = rank.view(rank.shape[0], self.num_groups, -1)
        group_rank = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)  # [rows, groups]
        return _keep_groups(groups, group_rank, self.num_groups_per_token)

    def _limit_to_windows(self, rank: Tensor, segments: Sequence[Segment]) -> Tensor:
        limited = torch.full_like(rank, -torch.inf)
        for rows in self._windows(segments):
            best = rank[rows].amax(0)  # [num_experts]
            allowed = best.topk(self.capacity, sorted=False).indices
            limited[rows, allowed] = rank[rows, allowed]
        return limited

    def _windows(self, segments: Sequence[Segment]) -> list[slice]:
        """Row ranges of the routing windows: aligned to absolute positions of one sequence."""
        windows = []
        for segment in segments:
            row, position = segment.start, segment.first_position
            while row < segment.stop:
                stop = min(segment.stop, row + self.window_tokens - position % self.window_tokens)
                windows.append(slice(row, stop))
                row, position = stop, position + stop - row
        return windows


@dataclass(frozen=True, slots=True)
class SoftmaxRouter:
    """The likeliest experts of a softmax over all of them (Mixtral, Qwen, OLMoE, DeepSeek-V2).

    The product has the precision of `weight`: the compute dtype, or float32; the softmax is in
    float32. With several groups only the experts of the best ones may be chosen (a group ranks
    by its best). Weights are the probabilities, normalised over the chosen or not, and scaled.
    """

    weight: Tensor  # [num_experts, hidden]
    num_experts_per_token: int
    normalise: bool
    rounds_weights: bool = False  # to the dtype of `weight`, where the family's own code does
    num_groups: int = 1
    num_groups_per_token: int = 1
    scaling_factor: float = 1.0
    products: Products = REFERENCE

    def route(self, x: Tensor, segments: Sequence[Segment], workspace: Buffers) -> Routing:
        # Logits, probabilities, ranks and top-k results: small, and without `out=` forms.
        workspace.library("router", 6 * 4 * x.shape[0] * self.weight.shape[0])
        with workspace.scope():
            logits = self._logits(x, workspace)
            if is_for_triton(logits):
                return self._choose_by_triton(logits)
            probabilities = logits.softmax(-1, dtype=torch.float32)
        rank = probabilities
        if self.num_groups > 1:
            rank = self._limit_to_groups(rank)
        experts = top_experts(rank, self.num_experts_per_token)
        weights = probabilities.gather(1, experts)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.rounds_weights:
            weights = weights.to(self.weight.dtype).float()
        return Routing(experts, weights * self.scaling_factor)

    def _choose_by_triton(self, logits: Tensor) -> Routing:
        from lowtide.kernels.triton_routing import ExpertChoice, choose_experts

        choice = ExpertChoice(
            self.num_experts_per_token,
            is_sigmoid=False,
            normalise=self.normalise,
            rounds_weights=self.rounds_weights,
            num_groups=self.num_groups,
            num_groups_kept=self.num_groups_per_token,
            scaling_factor=self.scaling_factor,
        )
        return Routing(*choose_experts(logits, None, choice))

    def _logits(self, x: Tensor, workspace: Buffers) -> Tensor:
        dtype = self.weight.dtype
        logits = workspace.take("router logits", (x.shape[0], self.weight.shape[0]), dtype)
        if dtype != x.dtype:
            x_fp32 = workspace.take("router input", tuple(x.shape), dtype)
            x = x_fp32.copy_(x)
        self.products.multiply(x, self.weight.t(), None, logits)
        return logits

    def _limit_to_groups(self, rank: Tensor) -> Tensor:
        groups = rank.view(rank.shape[0], self.num_groups, -1)
        return _keep_groups(groups, groups.amax(-1), self.num_groups_per_token)


@dataclass(frozen=True, slots=True)
class TopSoftmaxRouter:
    """The experts of the highest logits, weighed by a softmax over those alone (gpt-oss).

    Logits and weights are in the compute dtype.
    """

    weight: Tensor  # [num_experts, hidden]
    bias: Tensor  # [num_experts]
    num_experts_per_token: int

    def route(self, x: Tensor, segments: Sequence[Segment], workspace: Buffers) -> Routing:
        # Logits and top-k results: small, and without `out=` forms.
        workspace.library("router", 4 * 4 * x.shape[0] * self.weight.shape[0])
        logits = torch.addmm(self.bias, x, self.weight.t())
        experts = top_experts(logits, self.num_experts_per_token)
        return Routing(experts, logits.gather(1, experts).softmax(-1).float())


def _keep_groups(groups: Tensor, group_rank: Tensor, num_kept: int) -> Tensor:
    """Ranks [rows, experts] from groups [rows, groups, experts of one]: -inf but in the best."""
    chosen = group_rank.topk(num_kept, dim=-1, sorted=False).indices
    excluded = torch.ones_like(group_rank, dtype=torch.bool).scatter_(1, chosen, False)
    return groups.masked_fill(excluded[:, :, None], -torch.inf).flatten(1)
