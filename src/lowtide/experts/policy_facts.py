"""A layer's input and routing as facts for policies, and the routing that they may return."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtide.core import BoolArray, Demand, IntArray, RoutedTokens
from lowtide.experts.rows import ExpertRows, Routing
from lowtide.memory.pinned_copies import to_device
from lowtide.memory.workspace import Buffers


class HostInputs(NamedTuple):
    """Input and routing of a layer in host memory, valid until the next step."""

    x: Tensor | None  # [tokens, hidden]; None of a pass with more rows than fit
    experts: Tensor  # [tokens, k] int64
    routed: RoutedTokens | None = None  # the routing, for policies that ask for it
    predicted: IntArray | None = None  # tokens per expert of the next layer, by the early gate
    rows: ExpertRows | None = None  # the pairs of `experts`, beside a device


def routed_tokens(experts: Tensor, weights: Tensor, scores: Tensor | None) -> RoutedTokens:
    """View a routing in host memory as arrays, for policies."""
    return RoutedTokens(
        experts.numpy(), weights.numpy(), None if scores is None else scores.numpy()
    )


def demand_of(chosen: Tensor, is_resident: BoolArray) -> Demand:
    """Count the demand of a layer's router.

    chosen [tokens, k]: experts, in host memory; is_resident: [num_experts].
    """
    num_tokens = np.bincount(chosen.numpy().ravel())
    experts = np.flatnonzero(num_tokens)
    return Demand(experts, num_tokens[experts], is_resident[experts])


def take_substituted(workspace: Buffers, num_pairs: int) -> None:
    """Declare the scratch of `substituted_routing` for `num_pairs` (token, expert) pairs."""
    workspace.library("substituted routing", num_pairs * (8 + 4))


def substituted_routing(
    answer: RoutedTokens, router: Routing, workspace: Buffers
) -> tuple[Routing, Tensor]:
    """Return a substitution's routing on the router's device, and its ids in host memory.

    Both are copies: the router's own choice stays unchanged.
    """
    take_substituted(workspace, router.experts.numel())
    experts = torch.from_numpy(np.array(answer.experts, order="C"))
    weights = torch.from_numpy(np.array(answer.weights, order="C"))
    [flat_experts] = to_device(router.experts.device, experts.view(-1))
    [flat_weights] = to_device(router.weights.device, weights.view(-1))
    shape = router.experts.shape
    return Routing(flat_experts.view(shape), flat_weights.view(shape)), experts
