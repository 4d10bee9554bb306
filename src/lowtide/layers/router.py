"""Routers: choose experts and weights for each token, independent of placement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from lowtide.compute import Compute
from lowtide.config import ExpertSpec
from lowtide.experts.rows import Routing
from lowtide.kernels.layer_parts import RouterParts
from lowtide.kernels.operands import ExpertChoice
from lowtide.kernels.routing import weights_of
from lowtide.layers.batch import Segment
from lowtide.layers.rows import in_tiles
from lowtide.memory.workspace import TILE_ROWS, Buffers, tiles


@dataclass(frozen=True)
class Router:
    """Base of routers: the matrix of the product, and the means to compute it."""

    compute: Compute
    weight: Tensor  # [num_experts, hidden]

    @property
    def looks_at_positions(self) -> bool:
        """True if a token's experts depend on others at positions near it."""
        return False

    def route(self, x: Tensor, segments: Sequence[Segment]) -> Routing:
        """Route x [rows, hidden] in the compute dtype, independent of placement."""
        if x.shape[0] <= TILE_ROWS:
            return self._choose(x)
        found, workspace = [], self.compute.workspace
        for tile in tiles(x.shape[0], TILE_ROWS):
            with workspace.scope():
                found.append(self._choose(x[tile]))
        experts, weights = (torch.cat(parts) for parts in zip(*found, strict=True))
        workspace.library("routing", 2 * (experts.nbytes + weights.nbytes))  # parts are alive, too
        return Routing(experts, weights)

    def parts(self) -> RouterParts | None:
        """Return parts for kernels of whole layers; None if `RouterParts` do not suffice."""
        return None

    def within(self, workspace: Buffers) -> Self:
        """Return the router with scratch of its own, for predictions during a pass."""
        return replace(self, compute=replace(self.compute, workspace=workspace))

    def scores(self, x: Tensor) -> Tensor:
        """Compute the logits that `route` chooses by, without a selection-only bias.

        A separate product, for policies that need the logits. [rows, num_experts] float32.
        """
        shape = (len(x), len(self.weight))
        self.compute.workspace.library("router scores", 4 * math.prod(shape))
        scores = torch.empty(shape, dtype=torch.float32, device=x.device)
        in_tiles(self._score, x, scores)
        return scores

    def _choose(self, x: Tensor) -> Routing:
        """Route one tile of rows."""
        raise NotImplementedError

    def _score(self, x: Tensor, scores: Tensor) -> None:
        with self.compute.workspace.scope():
            scores.copy_(self._logits(x))

    def _logits(self, x: Tensor) -> Tensor:
        """Compute logits in the dtype of `weight`, in a buffer of the enclosing scope."""
        workspace, dtype = self.compute.workspace, self.weight.dtype
        logits = workspace.take("router logits", (len(x), len(self.weight)), dtype)
        if dtype != x.dtype:
            x = workspace.take("router input", tuple(x.shape), dtype).copy_(x)
        self.compute.kernels.multiply(x, self.weight.t(), self._logit_bias, logits)
        return logits

    @cached_property
    def _logit_bias(self) -> Tensor | None:
        """Bias of the logits. [num_experts]."""
        return None


@dataclass(frozen=True)
class SigmoidRouter(Router):
    """Sigmoid scores with a selection-only bias (LLaDA2, Ling 2.0; DeepSeek-V3's `noaux_tc`).

    scores = sigmoid(x W^T) in the precision of `weight`, float32 or, in LFM2, the compute dtype, to
    which weights of experts are rounded, too. Experts are chosen by score + bias,
    restricted either to the best groups (a group ranks by the sum of its two best) or, with
    `capacity`, to the experts that rank best in the token's routing window (LLaDA2.2: the maximum
    over the window's tokens).

    Their weights are the scores without bias, normalised over the chosen and scaled.
    """

    bias: Tensor | None  # [num_experts] float32
    num_experts_per_token: int
    num_groups: int
    num_groups_per_token: int
    capacity: int  # experts per routing window; 0: group-limited routing instead
    window_tokens: int
    normalise: bool
    scaling_factor: float
    sum_epsilon: float = 1e-20  # added to the sum of the chosen experts' scores

    @classmethod
    def of(
        cls,
        compute: Compute,
        spec: ExpertSpec,
        weight: Tensor,
        bias: Tensor | None,
        sum_epsilon: float = 1e-20,
    ) -> Self:
        return cls(
            compute,
            weight,
            bias,
            num_experts_per_token=spec.num_experts_per_token,
            num_groups=spec.num_groups,
            num_groups_per_token=spec.num_groups_per_token,
            capacity=spec.capacity,
            window_tokens=spec.window_tokens,
            normalise=spec.norm_topk_prob,
            scaling_factor=spec.scaling_factor,
            sum_epsilon=sum_epsilon,
        )

    @property
    def looks_at_positions(self) -> bool:
        return self.capacity > 0

    def route(self, x: Tensor, segments: Sequence[Segment]) -> Routing:
        if self.capacity:  # windows are of block-causal passes, which are one tile
            return self._choose_by_windows(x, segments)
        return super().route(x, segments)

    def parts(self) -> RouterParts | None:
        return None if self.capacity else RouterParts(self.weight, self.bias, self._choice)

    def _choose(self, x: Tensor) -> Routing:
        workspace = self.compute.workspace
        before = workspace.state
        self._declare(x)
        logits = self._logits(x)
        chosen = self.compute.kernels.choose_experts(logits, self.bias, self._choice)
        workspace.state = before
        return Routing(*chosen)

    def _declare(self, x: Tensor) -> None:
        """Declare scores, ranks, masks and top-k results: small, and without `out=` forms."""
        self.compute.workspace.library("router", 5 * 4 * x.shape[0] * self.weight.shape[0])

    def _choose_by_windows(self, x: Tensor, segments: Sequence[Segment]) -> Routing:
        kernels = self.compute.kernels
        with self.compute.workspace.scope():
            self._declare(x)
            scores = self._logits(x).sigmoid_()
            rank = scores if self.bias is None else scores + self.bias
            experts = kernels.top_experts(
                self._limit_to_windows(rank, segments), self.num_experts_per_token
            )
            return Routing(experts, weights_of(scores, experts, self._choice, scores.dtype))

    @cached_property
    def _choice(self) -> ExpertChoice:
        return ExpertChoice(
            self.num_experts_per_token,
            is_sigmoid=True,
            normalise=self.normalise,
            rounds_weights=True,
            num_groups=self.num_groups,
            num_groups_kept=self.num_groups_per_token,
            num_group_best=2,
            scaling_factor=self.scaling_factor,
            sum_epsilon=self.sum_epsilon,
        )

    def _limit_to_windows(self, rank: Tensor, segments: Sequence[Segment]) -> Tensor:
        limited = torch.full_like(rank, -torch.inf)
        for rows in self._windows(segments):
            best = rank[rows].amax(0)  # [num_experts]
            allowed = best.topk(self.capacity, sorted=False).indices
            limited[rows, allowed] = rank[rows, allowed]
        return limited

    def _windows(self, segments: Sequence[Segment]) -> list[slice]:
        """Return the row ranges of routing windows, aligned to each sequence's positions."""
        windows = []
        for segment in segments:
            row, position = segment.start, segment.first_position
            while row < segment.stop:
                stop = min(segment.stop, row + self.window_tokens - position % self.window_tokens)
                windows.append(slice(row, stop))
                row, position = stop, position + stop - row
        return windows


@dataclass(frozen=True)
class SoftmaxRouter(Router):
    """Most likely experts of a softmax over all (Mixtral, Qwen, OLMoE, DeepSeek-V2).

    The product has the precision of `weight`, compute dtype or float32; the softmax is in float32.
    With several groups only experts of the best ones may be chosen (a group ranks by its best).
    Weights are the probabilities, optionally normalised over the chosen, and scaled.
    """

    num_experts_per_token: int
    normalise: bool
    rounds_weights: bool = False  # to the dtype of `weight`, where the family's own code does
    num_groups: int = 1
    num_groups_per_token: int = 1
    scaling_factor: float = 1.0

    def parts(self) -> RouterParts:
        return RouterParts(self.weight, None, self._choice)

    def _choose(self, x: Tensor) -> Routing:
        workspace = self.compute.workspace
        # Logits, probabilities, ranks and top-k results: small, and without `out=` forms.
        workspace.library("router", 6 * 4 * x.shape[0] * self.weight.shape[0])
        before = workspace.state
        chosen = self.compute.kernels.choose_experts(self._logits(x), None, self._choice)
        workspace.state = before
        return Routing(*chosen)

    @cached_property
    def _choice(self) -> ExpertChoice:
        return ExpertChoice(
            self.num_experts_per_token,
            is_sigmoid=False,
            normalise=self.normalise,
            rounds_weights=self.rounds_weights,
            num_groups=self.num_groups,
            num_groups_kept=self.num_groups_per_token,
            scaling_factor=self.scaling_factor,
        )


@dataclass(frozen=True)
class TopSoftmaxRouter(Router):
    """Experts of the highest logits, weighted by a softmax over those alone (gpt-oss).

    Logits and weights are in the compute dtype.
    """

    bias: Tensor  # [num_experts]
    num_experts_per_token: int

    def parts(self) -> RouterParts:
        return RouterParts(self.weight, None, self._choice, self.bias)

    @cached_property
    def _logit_bias(self) -> Tensor | None:
        return self.bias

    def _choose(self, x: Tensor) -> Routing:
        # Top-k results: small, and without `out=` forms.
        workspace = self.compute.workspace
        workspace.library("router", 4 * 4 * x.shape[0] * self.weight.shape[0])
        before = workspace.state
        chosen = self.compute.kernels.choose_experts(self._logits(x), None, self._choice)
        workspace.state = before
        return Routing(*chosen)

    @cached_property
    def _choice(self) -> ExpertChoice:
        return ExpertChoice(
            self.num_experts_per_token, is_sigmoid=False, normalise=False, of_chosen=True
        )
