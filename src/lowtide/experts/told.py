"""What policies are told of a layer in one step, and the routing that they may answer."""

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


class AtHost(NamedTuple):
    """What the host is told of a layer's step, in host memory until the next one."""

    x: Tensor | None  # [tokens, hidden]; None of a pass that has more rows than there is room for
    experts: Tensor  # [tokens, k] int64
    told: RoutedTokens | None = None  # the routing, for policies that ask for it
    predicted: IntArray | None = None  # tokens per expert of the next layer, by the early gate


class Asked(NamedTuple):
    """What a layer is asked for."""

    experts: IntArray  # ascending
    num_tokens: IntArray  # of each of them
    told: RoutedTokens | None  # the routing, for policies that ask for it

    @classmethod
    def of(cls, chosen: Tensor, told: RoutedTokens | None) -> Asked:
        """chosen [tokens, k]: experts, in host memory."""
        num_tokens = np.bincount(chosen.numpy().ravel())
        experts = np.flatnonzero(num_tokens)
        return cls(experts, num_tokens[experts], told)


def tell(experts: Tensor, weights: Tensor, scores: Tensor | None) -> RoutedTokens:
    """What policies are told: the same memory, which has to be the host's, as arrays."""
    return RoutedTokens(
        experts.numpy(), weights.numpy(), None if scores is None else scores.numpy()
    )


def host_facts(
    call: LayerCall, asked: Asked, capacity: IntArray, costs: Costs, ledger: SlotLedger
) -> Facts:
    """The facts of a layer that the host runs alone. capacity: [num_layers]"""
    is_kept, (experts, num_tokens, told) = ledger.is_resident(call.layer), asked
    return Facts(
        call.step,
        call.layer,
        Demand(experts, num_tokens, is_kept[experts]),
        is_kept,
        capacity,
        costs,
        can_fetch=False,
        has_idle_link=False,
        routing=told,
        is_here=is_kept,
    )


def device_facts(
    call: LayerCall, asked: Asked, capacity: IntArray, costs: Costs, link: Link, host: HostTier
) -> Facts:
    """The facts of a layer with a device beside the host, behind `link`. capacity: [num_layers]"""
    link.bind_arrived()
    layer, (experts, num_tokens, told) = call.layer, asked
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
        routing=told,
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
