"""The facts that policies get about a layer in one step, and the routing that they may answer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtide.core import Costs, Demand, Facts, IntArray, RoutedTokens
from lowtide.experts.host_tier import HostTier
from lowtide.experts.link import Link
from lowtide.experts.rows import LayerCall, Routing
from lowtide.experts.slots import SlotLedger
from lowtide.memory.pinned_copies import to_device
from lowtide.memory.workspace import Buffers


class HostInputs(NamedTuple):
    """A layer's input and routing in host memory, until the next step."""

    x: Tensor | None  # [tokens, hidden]; None of a pass that has more rows than there is room for
    experts: Tensor  # [tokens, k] int64
    routed: RoutedTokens | None = None  # the routing, for policies that ask for it
    predicted: IntArray | None = None  # tokens per expert of the next layer, by the early gate


class LayerDemand(NamedTuple):
    """The experts that a layer's router asks for."""

    experts: IntArray  # ascending
    num_tokens: IntArray  # of each of them
    routed: RoutedTokens | None  # the routing, for policies that ask for it

    @classmethod
    def of(cls, chosen: Tensor, routed: RoutedTokens | None) -> LayerDemand:
        """chosen [tokens, k]: experts, in host memory."""
        num_tokens = np.bincount(chosen.numpy().ravel())
        experts = np.flatnonzero(num_tokens)
        return cls(experts, num_tokens[experts], routed)


def routed_tokens(experts: Tensor, weights: Tensor, scores: Tensor | None) -> RoutedTokens:
    """A routing in host memory as arrays over the same memory, for policies."""
    return RoutedTokens(
        experts.numpy(), weights.numpy(), None if scores is None else scores.numpy()
    )


def host_facts(
    call: LayerCall, asked: LayerDemand, capacity: IntArray, costs: Costs, ledger: SlotLedger
) -> Facts:
    """The facts of a layer that the host runs alone. capacity: [num_layers]"""
    is_kept, (experts, num_tokens, routed) = ledger.is_resident(call.layer), asked
    return Facts(
        call.step,
        call.layer,
        Demand(experts, num_tokens, is_kept[experts]),
        is_kept,
        capacity,
        costs,
        can_fetch=False,
        has_idle_link=False,
        routing=routed,
        is_here=is_kept,
    )


def device_facts(
    call: LayerCall,
    asked: LayerDemand,
    capacity: IntArray,
    costs: Costs,
    link: Link,
    host: HostTier,
) -> Facts:
    """The facts of a layer with a device beside the host, behind `link`. capacity: [num_layers]"""
    link.bind_arrived()
    layer, (experts, num_tokens, routed) = call.layer, asked
    is_here = link.ledger.is_resident(layer)
    return Facts(
        call.step,
        layer,
        Demand(experts, num_tokens, is_here[experts]),
        link.is_kept(layer),
        capacity,
        costs,
        link.arriving_s(layer, experts),
        link.busy_s,
        can_fetch=costs.num_staging > 0,
        routing=routed,
        is_here=is_here,
        is_at_host=None if host.is_permanent else host.ledger.is_resident(layer),
    )


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
