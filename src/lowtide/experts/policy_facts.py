"""What policies are told of a layer's input and routing, and the routing that they may answer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtide.core import BoolArray, Demand, IntArray, RoutedTokens
from lowtide.experts.rows import Routing
from lowtide.memory.pinned_copies import to_device
from lowtide.memory.workspace import Buffers


class HostInputs(NamedTuple):
    """A layer's input and routing in host memory, until the next step."""

    x: Tensor | None  # [tokens, hidden]; None of a pass that has more rows than there is room for
    experts: Tensor  # [tokens, k] int64
    routed: RoutedTokens | None = None  # the routing, for policies that ask for it
    predicted: IntArray | None = None  # tokens per expert of the next layer, by the early gate


def routed_tokens(experts: Tensor, weights: Tensor, scores: Tensor | None) -> RoutedTokens:
    """A routing in host memory as arrays over the same memory, for policies."""
    return RoutedTokens(
        experts.numpy(), weights.numpy(), None if scores is None else scores.numpy()
    )


def demand_of(chosen: Tensor, is_resident: BoolArray) -> Demand:
    """What a layer's router asks for. chosen [tokens, k]: experts, in host memory; is_resident:
    [num_experts].
    """
    num_tokens = np.bincount(chosen.numpy().ravel())
    experts = np.flatnonzero(num_tokens)
    return Demand(experts, num_tokens[experts], is_resident[experts])


def take_substituted(workspace: Buffers, num_pairs: int) -> None:
    """Declares what `substituted_routing` makes for so many (token, expert) pairs."""
    workspace.library("substituted routing", num_pairs * (8 + 4))


def substituted_routing(
    answer: RoutedTokens, router: Routing, workspace: Buffers
) -> tuple[Routing, Tensor]:
    """What a substitution answered, where the router's choice is, and its ids in host memory.

    Copies: the router's own choice stays as it is.
    """
    take_substituted(workspace, router.experts.numel())
    experts = torch.from_numpy(np.array(answer.experts, order="C"))
    weights = torch.from_numpy(np.array(answer.weights, order="C"))
    [flat_experts] = to_device(router.experts.device, experts.view(-1))
    [flat_weights] = to_device(router.weights.device, weights.view(-1))
    shape = router.experts.shape
    return Routing(flat_experts.view(shape), flat_weights.view(shape)), experts
