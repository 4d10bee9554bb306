"""The catalogue: which placement, assignment and prefetch each named preset is made of.

What the simulator replays and what the hybrid runtime will offer. Every preset shares all
mechanisms, so comparing presets compares policies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lowtide.core import Costs, FloatArray, IntArray
from lowtide.errors import UsageError
from lowtide.policies.assignment import (
    AllFetch,
    AllHost,
    Assign,
    Balance,
    Fiddler,
    Greedy,
    HybriMoEGreedy,
    HybriMoEThreshold,
    LayerSplit,
)
from lowtide.policies.decision import Policies
from lowtide.policies.placement import (
    LRU,
    DaliWindow,
    Frequency,
    Lowtide,
    Placement,
    ScoreCache,
    Static,
    Tide,
    layer_budgets,
)
from lowtide.policies.prefetch import (
    Combined,
    NextGate,
    NoPrefetch,
    PaysOff,
    Prefetch,
    PreviousStep,
    Residual,
    Statistics,
)
from lowtide.policies.split import Favourites, FixedShare, Split, best_split, least_s
from lowtide.policies.tau import OnlineTau, TauChange

_NUM_WHOLE = 4  # numbers of whole layers that are compared
_LEAST_GAIN = 1.02  # less may be chance: another text has other favourites (docs/log.md)


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """What the policies of a preset are made from.

    capacity: residents per MoE layer; `lowtide` divides as many in all as it finds best.
    frequency: [layers, experts], a calibration's activations; without one static presets keep the
        first experts by id.
    following: [layers - 1, experts, experts], from `count_following`; without one no statistics.
    hits: [passes, layers, experts], a calibration's tokens per expert, the load that
        `moe-lightning` plans for and `lowtide` divides its residents for; without one every
        expert is given one token, and all layers what `capacity` says.
    tau: TIDE's interval, also `lowtide`'s; online_tau: whether it follows the drift from there,
        and tells `on_tau_change`.
    waits: whether `tide` waits for the experts it admits (Eq. 3), or lets the moves follow.
    w_size, u_size: DALI's window and swap sizes.
    by_threshold: whether `fiddler` fetches an expert that would end sooner so, or never fetches.
    by_greedy: whether `hybrimoe` assigns as its code does, or by the threshold DALI describes.
    num_prefetch: experts fetched ahead per layer, at most.
    max_step_bytes: moves of `lowtide` per forward pass, at most.
    """

    capacity: Sequence[int]
    num_experts: int
    costs: Costs
    frequency: FloatArray | None = None
    following: FloatArray | None = None
    hits: IntArray | None = None
    tau: int = 4
    online_tau: bool = False
    on_tau_change: Callable[[TauChange], None] = lambda change: None
    waits: bool = False
    by_threshold: bool = False
    by_greedy: bool = False
    w_size: int = 4
    u_size: int = 8
    num_prefetch: int = 4
    max_step_bytes: int | None = None
    seed: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.capacity)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A preset: how each of its three policies is made from a setting.

    can_wait: whether it has the choice that `Setting.waits` makes.
    """

    placement: Callable[[Setting], Placement]
    assignment: Callable[[Setting], Assign]
    prefetch: Callable[[Setting], Prefetch] = lambda setting: NoPrefetch()
    can_wait: bool = False
    weighs_moves: bool = False  # whether the placement asks what a move costs

    def policies(self, setting: Setting) -> Policies:
        """The preset at work, for one model, budget and machine."""
        return Policies(
            self.placement(setting),
            self.assignment(setting),
            self.prefetch(setting),
            waits=self.can_wait and setting.waits,
        )


def recipe(name: str) -> Recipe:
    """The preset called `name`; raises UsageError when there is none."""
    if name not in CATALOGUE:
        raise UsageError(f"Preset {name!r} is not known; choose one of {', '.join(CATALOGUE)}.")
    return CATALOGUE[name]


def _all_residents(setting: Setting) -> Placement:
    return Static.first([setting.num_experts] * setting.num_layers)


def _no_residents(setting: Setting) -> Placement:
    return Static.first([0] * setting.num_layers)


def _best_known(setting: Setting) -> Placement:
    """The most used experts of the calibration, else the first."""
    if setting.frequency is None:
        return Static.first(setting.capacity)
    return Frequency(setting.capacity, setting.frequency)


def _edgemoe(setting: Setting) -> Placement:
    frequency = setting.frequency
    if frequency is None:
        frequency = np.zeros((setting.num_layers, setting.num_experts))
    return Frequency(setting.capacity, frequency, learns=True)


def _device_layers(setting: Setting) -> list[bool]:
    """The last layers, as many as the slots hold whole; the first are the host's."""
    num_whole = min(setting.num_layers, sum(setting.capacity) // setting.num_experts)
    return [layer >= setting.num_layers - num_whole for layer in range(setting.num_layers)]


def _whole_layers(setting: Setting) -> Placement:
    return Static.first([setting.num_experts * on for on in _device_layers(setting)])


def _tide(setting: Setting) -> Placement:
    tau = _online_tau(setting) if setting.online_tau else setting.tau
    return Tide(setting.capacity, setting.num_experts, tau)


def _dali(setting: Setting) -> Placement:
    return DaliWindow(
        setting.capacity, setting.num_experts, setting.w_size, setting.u_size, setting.seed
    )


def _lowtide(setting: Setting) -> Placement:
    return Lowtide(
        _divided(setting),
        setting.num_experts,
        setting.costs,
        tau=_online_tau(setting) if setting.online_tau else setting.tau,
        max_step_bytes=setting.max_step_bytes,
        frequency=setting.frequency,
    )


def _divided(setting: Setting) -> Sequence[int]:
    """Residents of each layer by marginal benefit, or with some layers whole, where the
    calibration would run faster so."""
    if setting.hits is None:
        return setting.capacity
    use, total = _use(setting.hits), sum(setting.capacity)
    by_benefit: list[int] = layer_budgets(use, total).tolist()
    divided = [by_benefit, *_with_whole_layers(setting)]
    as_given_s, *seconds = (
        least_s(setting.hits, capacity, use, setting.costs)
        for capacity in (setting.capacity, *divided)
    )
    least = min(seconds)
    is_faster = as_given_s > _LEAST_GAIN * least
    return divided[seconds.index(least)] if is_faster else setting.capacity


def _with_whole_layers(setting: Setting) -> Iterator[list[int]]:
    """As many residents, with some of the last layers whole: nothing has to be decided about
    such layers, nor be waited for. The others have equal shares of the rest."""
    num_layers, num_experts = setting.num_layers, setting.num_experts
    total = sum(setting.capacity)
    most = min(num_layers - 1, total // num_experts)
    for num_whole in np.unique(np.linspace(0, most, 1 + _NUM_WHOLE).astype(int))[1:].tolist():
        num_others = num_layers - num_whole
        share, num_more = divmod(total - num_whole * num_experts, num_others)
        others = [min(num_experts, share + (layer < num_more)) for layer in range(num_others)]
        yield others + [num_experts] * num_whole


def _online_tau(setting: Setting) -> OnlineTau:
    # A missed expert of a small step has a token or so; four layers of the model are watched.
    costs, num_layers = setting.costs, setting.num_layers
    budget = max(1, round(sum(setting.capacity) / num_layers))
    watched = range(0, num_layers, max(1, num_layers // 4))
    return OnlineTau(
        setting.num_experts,
        budget,
        costs.fetch_s,
        costs.host_s.at(1),
        tau=setting.tau,
        watched=watched,
        on_change=setting.on_tau_change,
    )


def _what_pays(setting: Setting) -> Prefetch:
    """The next gate and the step before together, while they pay."""
    num_ahead, costs = setting.num_prefetch, setting.costs
    is_calibrated = setting.frequency is not None  # and so has residual vectors
    gate = Residual(num_ahead) if is_calibrated else NextGate(num_ahead)
    last = PreviousStep(num_ahead, setting.num_layers, setting.num_experts)
    both = Combined(num_ahead, [(gate, 1.0), (last, 1.0)])
    return PaysOff(both, gain_s=costs.fetch_s, cost_s=costs.fetch_s)


def _statistics(setting: Setting) -> Prefetch:
    if setting.following is None:
        return NoPrefetch()
    return Statistics(setting.num_prefetch, setting.following)


@lru_cache(maxsize=1)  # asked for by each of the preset's three policies
def _best_split(setting: Setting) -> Split:
    load = _load(setting)
    return best_split(load, setting.capacity, _use(load), setting.costs, setting.num_prefetch)


def _load(setting: Setting) -> IntArray:
    if setting.hits is not None:
        return setting.hits
    return np.ones((1, setting.num_layers, setting.num_experts), np.int64)


def _use(load: IntArray) -> FloatArray:
    """Passes in which each expert is active. [layers, experts]"""
    use: FloatArray = (load > 0).sum(axis=0).astype(np.float64)
    return use


def _planned_residents(setting: Setting) -> Placement:
    share = _best_split(setting).resident_share
    return Frequency([round(share * slots) for slots in setting.capacity], _use(_load(setting)))


def _planned_prefetch(setting: Setting) -> Prefetch:
    return Favourites(_best_split(setting).num_ahead, _use(_load(setting)))


CATALOGUE: Mapping[str, Recipe] = {
    "resident": Recipe(_all_residents, lambda s: AllHost()),
    "all-host": Recipe(_no_residents, lambda s: AllHost()),
    "on-demand": Recipe(_no_residents, lambda s: AllFetch(s.costs)),
    "tide": Recipe(_tide, lambda s: AllHost(), can_wait=True),
    "dali": Recipe(_dali, lambda s: Greedy(s.costs), lambda s: Residual(s.num_prefetch)),
    "lowtide": Recipe(_lowtide, lambda s: Balance(s.costs), _what_pays, weighs_moves=True),
    "static": Recipe(_best_known, lambda s: AllFetch(s.costs)),
    "lru": Recipe(lambda s: LRU(s.capacity, s.num_experts), lambda s: AllFetch(s.costs)),
    "fiddler": Recipe(_best_known, lambda s: Fiddler(s.costs, s.by_threshold)),
    "hybrimoe": Recipe(
        lambda s: ScoreCache(s.capacity, s.num_experts),
        lambda s: HybriMoEGreedy(s.costs) if s.by_greedy else HybriMoEThreshold(s.costs),
        lambda s: NextGate(s.num_prefetch),
    ),
    "edgemoe": Recipe(_edgemoe, lambda s: AllFetch(s.costs), _statistics),
    "moe-lightning": Recipe(
        _planned_residents,
        lambda s: FixedShare(_best_split(s).fetch_share),
        _planned_prefetch,
    ),
    "layer-split": Recipe(_whole_layers, lambda s: LayerSplit(_device_layers(s))),
}
"""Every preset by name. `resident` ignores the capacity: it is the machine without a limit."""
