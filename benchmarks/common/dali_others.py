"""What DALI compares itself with, as it is here, and as DALI may have run it.

Where its paper leaves open how another system was set up, or how fast its own machine computes what
the fit did not see, an experiment changes that one thing, or that and one more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from lowtide.core import Curve, IntArray
from lowtide.policies.assignment import Assign, HybriMoEThreshold
from lowtide.policies.catalogue import NUM_PREFETCH
from lowtide.policies.division import use_of, whole_layers
from lowtide.policies.placement import Static
from lowtide.policies.presets import recipe
from lowtide.policies.recipe import Recipe, Setting
from lowtide.policies.split import FixedShare, best_split
from lowtide.replay.simulator import simulate
from lowtide.replay.trace import Trace

LAYERS = (0.625, 0.75, 0.875)  # shares of them on the device, where half are usual
FEW_TOKENS = 8
"""The fit of the machine is of experts with few tokens, since its anchors are of decoding."""
FASTER = (2, 4)  # times, from `FEW_TOKENS` on
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # of curves


@dataclass(frozen=True)
class Case:
    """One model and batch in one phase. decode_load: tokens per expert of decoding another text."""

    part: Trace
    setting: Setting
    hits: IntArray
    decode_load: IntArray

    def seconds(self, made: str | Recipe, **changes: object) -> float:
        setting = replace(self.setting, **changes)  # type: ignore[arg-type]
        return simulate(self.part, made, setting, hits=self.hits).total_s

    def having(self, **changes: object) -> Case:
        """The same with another setting."""
        return replace(self, setting=replace(self.setting, **changes))  # type: ignore[arg-type]


Lane = Callable[[Case], float]
"""Seconds of what DALI is compared with."""
World = Callable[[Case], Case]
"""What is otherwise for DALI, too."""


def _as_it_is(case: Case) -> Case:
    return case


class Rival(NamedTuple):
    """Who is compared with, and in what world."""

    lane: Lane
    world: World = _as_it_is


def from_tokens(tokens: int) -> Callable[[Setting], Assign]:
    """HybriMoE's assignment with another threshold."""
    return lambda setting: HybriMoEThreshold(setting.costs, tokens)


def with_residents(case: Case, share: float) -> Case:
    """So many of each layer's experts are resident."""
    num = round(share * case.setting.num_experts)
    return case.having(capacity=[num] * case.setting.num_layers)


def with_dense_ms(case: Case, ms: float) -> Case:
    """What else a layer takes."""
    return case.having(costs=replace(case.setting.costs, dense_s=Curve([(1, 1e-3 * ms)])))


def with_quick_rows(case: Case, times: float) -> Case:
    """The host takes less for each token of an expert beyond the first ones, as a kernel for many
    rows does that reads and widens a weight once for all of them."""
    host_s = case.setting.costs.host_s

    def seconds(tokens: int) -> float:
        few_s = host_s.at(min(tokens, FEW_TOKENS))
        return few_s + (host_s.at(tokens) - few_s) / times

    curve = Curve([(n, seconds(n)) for n in _TOKENS])
    return case.having(costs=replace(case.setting.costs, host_s=curve))


def _preset(name: str) -> Rival:
    return Rival(lambda case: case.seconds(name))


def _layers(share: float) -> Lane:
    """Layer-wise, with this share of the layers on the device."""

    def seconds(case: Case) -> float:
        setting = case.setting
        num = round(share * setting.num_experts)
        return case.seconds("layer-split", capacity=[num] * setting.num_layers)

    return seconds


def _quick_rows(times: float) -> World:
    return lambda case: with_quick_rows(case, times)


def _layer_splits() -> dict[str, Rival]:
    halves = (0.5, *LAYERS)
    rivals = {_on_device(share): Rival(_layers(share)) for share in LAYERS}
    for times in FASTER:
        world = _quick_rows(times)
        told = f"hosts are {times} times as fast from {FEW_TOKENS} tokens of an expert on"
        for share in halves:
            name = told if share == 0.5 else f"{told}, and {_on_device(share)}"
            rivals[name] = Rival(_layers(share), world)
    return rivals


def _on_device(share: float) -> str:
    return f"{share:.1%} of its layers are on the device"


def _hybrimoe_from(num_tokens: int) -> Rival:
    made = replace(recipe("hybrimoe"), assignment=from_tokens(num_tokens))
    return Rival(lambda case: case.seconds(made))


def _whole_layer_lightning(case: Case) -> float:
    """MoE-Lightning with whole layers resident, as DALI says it ran it."""
    setting = case.setting
    load, capacity = np.asarray(setting.hits), whole_layers(setting)
    num_ahead = NUM_PREFETCH.of(setting)
    plan = best_split(load, capacity, use_of(load), setting.costs, num_ahead)
    made = Recipe(
        lambda s: Static.first(s.capacity, s.num_experts), lambda s: FixedShare(plan.fetch_share)
    )
    return case.seconds(made, capacity=capacity)


def _without_residents(preset: str) -> Rival:
    return Rival(lambda case: case.seconds(preset, capacity=[0] * case.setting.num_layers))


def _in_16_bits(case: Case, memory: int) -> float:
    """Fiddler as its code keeps weights: four times the bytes for the host and over the link, and
    in `memory` times DALI's for residents."""
    costs = case.setting.costs
    host_s = Curve([(n, 4 * costs.host_s.at(n)) for n in _TOKENS])
    costs = replace(costs, link_s=4 * costs.link_s, host_s=host_s)
    capacity = [memory * slots // 4 for slots in case.setting.capacity]
    return case.seconds("fiddler", costs=costs, capacity=capacity)


OTHERS: Mapping[str, Mapping[str, Rival]] = {
    "layer-split": {"": _preset("layer-split"), **_layer_splits()},
    "moe-lightning": {
        "": _preset("moe-lightning"),
        "it has not seen the load": Rival(
            lambda case: case.seconds("moe-lightning", hits=None, frequency=None)
        ),
        "it keeps whole layers": Rival(_whole_layer_lightning),
        "it plans for decoding": Rival(
            lambda case: case.seconds("moe-lightning", hits=case.decode_load)
        ),
    },
    "hybrimoe": {
        "": _preset("hybrimoe"),
        **{f"it fetches from {n} tokens": _hybrimoe_from(n) for n in (4, 6, 8, 16, 32)},
        "it has no residents": _without_residents("hybrimoe"),
    },
    "fiddler": {
        "": _preset("fiddler"),
        "its weights have 16 bits": Rival(lambda case: _in_16_bits(case, 4)),
        "its weights have 16 bits, in half of that memory": Rival(
            lambda case: _in_16_bits(case, 2)
        ),
        "its weights have 16 bits, in a quarter of it": Rival(lambda case: _in_16_bits(case, 1)),
    },
}
"""By preset: as it is, and as DALI may have run it."""
