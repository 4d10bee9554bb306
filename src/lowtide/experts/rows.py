"""What one MoE layer works on in one step: its routing, sorted by expert, and its scratch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtide.core import IntArray, MoEShape
from lowtide.kernels.operands import SortedPairs
from lowtide.memory.workspace import Buffers


class Routing(NamedTuple):
    """The router's choice for each token, experts in ascending id."""

    experts: Tensor  # [tokens, k] int64
    weights: Tensor  # [tokens, k] float32


class ExpertRows:
    """The (token, expert) pairs of a step, sorted by expert, tokens ascending within one.

    token_of [tokens * k]: the token of each sorted pair. part_of [tokens, k]: where a token's
    j-th pair went. counts [num_experts]: pairs of each expert. All int64, on the device of the
    routing.
    """

    __slots__ = ("_bounds", "counts", "part_of", "token_of")

    def __init__(self, pairs: SortedPairs) -> None:
        self.token_of, self.part_of, self.counts = pairs
        self._bounds: IntArray | None = None

    @property
    def bounds(self) -> IntArray:
        """Expert e has sorted pairs bounds[e] to bounds[e + 1]. [num_experts + 1]

        The first use is the layer's one device-to-host synchronisation.
        """
        if self._bounds is None:
            return self.learn(self.counts.cpu())
        return self._bounds

    def learn(self, host_counts: Tensor) -> IntArray:
        """Makes `bounds` known from a copy of `counts` in host memory."""
        bounds = np.zeros(len(host_counts) + 1, np.int64)
        np.cumsum(host_counts.numpy(), out=bounds[1:])
        self._bounds = bounds
        return bounds

    @property
    def is_known(self) -> bool:
        """Whether `bounds` needs no synchronisation any more."""
        return self._bounds is not None

    def pairs(self, expert: int) -> slice:
        """The sorted pairs of one expert."""
        bounds = self.bounds
        return slice(int(bounds[expert]), int(bounds[expert + 1]))

    def groups(self, experts: IntArray, slots: IntArray) -> IntArray:
        """The slot, first sorted pair and number of pairs of each expert. [experts, 3]"""
        groups = np.empty((len(experts), 3), np.int64)
        groups[:, 0] = slots
        groups[:, 1] = self.bounds[experts]
        groups[:, 2] = self.bounds[experts + 1] - groups[:, 1]
        return groups


class HostScratch(NamedTuple):
    """Where the host's experts keep gate and up beside a device: rows as in `ExpertBuffers`."""

    gate: Tensor  # [max_rows * k, expert_size]
    up: Tensor  # [max_rows * k, expert_size]


class ExpertBuffers(NamedTuple):
    """The layer's scratch. Rows are bounded by the plan's `max_rows`, so `parts` is too."""

    parts: Tensor  # [tokens * k, hidden]: inputs of each pair, then its expert's output
    gate: Tensor  # [tokens * k, expert_size]: each expert its own rows, threads share nothing
    up: Tensor  # [tokens * k, expert_size]
    term: Tensor  # [tokens, hidden]
    term_fp32: Tensor  # [tokens, hidden] float32

    @classmethod
    def take(cls, workspace: Buffers, shape: MoEShape, x: Tensor) -> ExpertBuffers:
        num_tokens, hidden = x.shape
        num_pairs = num_tokens * shape.num_experts_per_token
        workspace.library("expert rows", 6 * 8 * num_pairs)
        return cls(
            parts=workspace.take("expert parts", (num_pairs, hidden), x.dtype),
            gate=workspace.take("expert gate", (num_pairs, shape.expert_size), x.dtype),
            up=workspace.take("expert up", (num_pairs, shape.expert_size), x.dtype),
            term=workspace.take("combine term", (num_tokens, hidden), x.dtype),
            term_fp32=workspace.take("combine term fp32", (num_tokens, hidden), torch.float32),
        )
