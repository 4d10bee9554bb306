"""Division of residents among layers at the start, by their worth in a calibration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lowtide.core import FloatArray, IntArray
from lowtide.policies.recipe import PolicyInputs
from lowtide.policies.split import least_s

_NUM_WHOLE = 4  # numbers of whole layers that are compared
_LEAST_GAIN = 1.02  # less may be chance: another text has other favourites (docs/log)


def divided(inputs: PolicyInputs) -> Sequence[int]:
    """Divide residents among layers by marginal benefit.

    Some layers become complete instead if the calibration would run faster so.
    """
    if inputs.hits is None:
        return inputs.capacity
    use, total = use_of(inputs.hits), sum(inputs.capacity)
    by_benefit: list[int] = layer_budgets(use, total).tolist()
    ways = [by_benefit, *_with_whole_layers(inputs)]
    as_given_s, *seconds = (
        least_s(inputs.hits, capacity, use, inputs.costs) for capacity in (inputs.capacity, *ways)
    )
    least = min(seconds)
    is_faster = as_given_s > _LEAST_GAIN * least
    return ways[seconds.index(least)] if is_faster else inputs.capacity


def use_of(load: IntArray) -> FloatArray:
    """Return the number of passes in which each expert is active, [layers, experts].

    load [passes, layers, experts]: tokens.
    """
    use: FloatArray = (load > 0).sum(axis=0).astype(np.float64)
    return use


def layer_budgets(frequency: FloatArray, total: int) -> IntArray:
    """Return residents per layer, `total` in all, by marginal benefit: [layers].

    frequency [layers, experts]: the worth of an expert's residency, in any unit. The best `total`
    experts of the whole model are counted by layer; equal worths go round the layers.
    """
    num_layers, num_experts = frequency.shape
    worth = -np.sort(-frequency, axis=1)  # a layer's marginal benefit of one more resident
    rank = np.broadcast_to(np.arange(num_experts), worth.shape)
    order = np.lexsort((rank.ravel(), -worth.ravel()))
    budgets: IntArray = np.bincount(order[:total] // num_experts, minlength=num_layers)
    return budgets


def _with_whole_layers(inputs: PolicyInputs) -> Iterator[list[int]]:
    """Yield divisions of the same total in which some of the last layers are complete.

    Complete layers need no decisions and no waiting. The other layers share the rest equally.
    """
    num_layers, num_experts = inputs.num_layers, inputs.num_experts
    total = sum(inputs.capacity)
    most = min(num_layers - 1, total // num_experts)
    for num_whole in np.unique(np.linspace(0, most, 1 + _NUM_WHOLE).astype(int))[1:].tolist():
        num_others = num_layers - num_whole
        share, num_more = divmod(total - num_whole * num_experts, num_others)
        others = [min(num_experts, share + (layer < num_more)) for layer in range(num_others)]
        yield others + [num_experts] * num_whole
