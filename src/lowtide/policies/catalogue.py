"""The catalogue: every preset, each with all that it is.

Presets share all mechanisms, so comparing presets compares policies. To add one, add an entry
here (and a paragraph to docs/policies.md); everything else asks the catalogue.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from lowtide.core import IntArray
from lowtide.errors import UsageError
from lowtide.policies import buddymoe
from lowtide.policies.assignment import (
    AllFetch,
    Assign,
    Balance,
    Fiddler,
    Greedy,
    HybriMoEGreedy,
    HybriMoEThreshold,
    LayerSplit,
)
from lowtide.policies.division import divided, use_of, whole_layers
from lowtide.policies.lowtide import Lowtide
from lowtide.policies.online_tau import OnlineTau
from lowtide.policies.placement import (
    LRU,
    DaliWindow,
    Frequency,
    Placement,
    ScoreCache,
    Static,
    Tide,
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
from lowtide.policies.recipe import MAX_WHOLE, PolicyOption, Recipe, Setting, switch
from lowtide.policies.split import Favourites, FixedShare, Split, best_split
from lowtide.policies.tau import FollowDrift, SolvedTau

# TIDE's interval, in steps: auto follows the demand, paper is its Eq. 7.
TAU: PolicyOption[int | FollowDrift | SolvedTau] = PolicyOption(
    "tau", 4, 1, MAX_WHOLE, {"auto": FollowDrift(), "paper": SolvedTau.PAPER}
)
WAITS = switch("waits")  # a refresh, for what it admits; else the moves follow
STARTS_EMPTY = switch("starts_empty")  # prompts refresh nothing: no expert is resident at first
BY_THRESHOLD = switch("by_threshold")  # an expert that alone would end sooner is fetched
BY_GREEDY = switch("by_greedy")  # it assigns as its code does, not by a threshold
W_SIZE = PolicyOption("w_size", 4, 1, MAX_WHOLE)  # steps of a window
U_SIZE = PolicyOption("u_size", 8, 0, MAX_WHOLE)  # residents that a window may swap, at most
# Whether all of them are swapped, as printed, or only those that score less than who comes.
SWAP = PolicyOption("swap", True, words={"always": True, "better": False})
NUM_PREFETCH = PolicyOption("num_prefetch", 4, 0, MAX_WHOLE)  # of a layer, at most
# Moves of a forward pass, at most; any number unless given.
MAX_STEP_BYTES: PolicyOption[int | None] = PolicyOption("max_step_bytes", None, 1, 10**15)


def _first(setting: Setting) -> Placement:
    return Static.first(setting.capacity, setting.num_experts)


def _all_experts(setting: Setting) -> list[int]:
    return [setting.num_experts] * setting.num_layers


def _no_experts(setting: Setting) -> list[int]:
    return [0] * setting.num_layers


def _best_known(setting: Setting) -> Placement:
    """The most used experts of the calibration, else the first."""
    if setting.frequency is None:
        return _first(setting)
    return Static.favourites(setting.capacity, setting.frequency)


def _edgemoe(setting: Setting) -> Placement:
    frequency = setting.frequency
    if frequency is None:
        frequency = np.zeros((setting.num_layers, setting.num_experts))
    return Frequency(setting.capacity, frequency)


def _lru(setting: Setting) -> Placement:
    return LRU(setting.num_layers, setting.num_experts)


def _tide(setting: Setting) -> Placement:
    starts_empty = STARTS_EMPTY.of(setting)
    return Tide(setting.num_layers, setting.num_experts, _tau(setting), starts_empty)


def _dali(setting: Setting) -> Placement:
    w_size, u_size = W_SIZE.of(setting), U_SIZE.of(setting)
    capacity, always = setting.capacity, SWAP.of(setting)
    return DaliWindow(capacity, setting.num_experts, w_size, u_size, setting.seed, always)


def _lowtide(setting: Setting) -> Placement:
    return Lowtide(
        setting.capacity,
        setting.num_experts,
        setting.costs,
        tau=_tau(setting),
        max_step_bytes=MAX_STEP_BYTES.of(setting),
        frequency=setting.frequency,
    )


def _tau(setting: Setting) -> int | OnlineTau:
    tau = TAU.of(setting)
    if isinstance(tau, SolvedTau):
        raise UsageError(f"tau={tau.value} is to be solved from a calibration first.")
    if isinstance(tau, int):
        return tau
    num_layers = setting.num_layers  # of which four are watched
    return OnlineTau(
        setting.num_experts,
        max(1, round(sum(setting.capacity) / num_layers)),
        setting.costs,
        waits=WAITS.of(setting),
        tau=tau.start,
        watched=range(0, num_layers, max(1, num_layers // 4)),
        on_change=setting.on_tau_change,
    )


def _what_pays(setting: Setting) -> Prefetch:
    """The next gate and the step before together, while they pay."""
    num_ahead = NUM_PREFETCH.of(setting)
    is_calibrated = setting.frequency is not None  # and so has residual vectors
    gate = Residual(num_ahead) if is_calibrated else NextGate(num_ahead)
    last = PreviousStep(num_ahead, setting.num_layers, setting.num_experts)
    return PaysOff(Combined(num_ahead, gate, last))


def _statistics(setting: Setting) -> Prefetch:
    if setting.following is None:
        return NoPrefetch()
    return Statistics(NUM_PREFETCH.of(setting), setting.following)


def _balance(setting: Setting) -> Assign:
    return Balance() if setting.twins is None else setting.twins.balance()


@lru_cache(maxsize=1)  # asked for by each of the preset's policies
def _best_split(setting: Setting) -> Split:
    load, num_ahead = _load(setting), NUM_PREFETCH.of(setting)
    return best_split(load, setting.capacity, use_of(load), setting.costs, num_ahead)


def _load(setting: Setting) -> IntArray:
    if setting.hits is not None:
        return setting.hits
    return np.ones((1, setting.num_layers, setting.num_experts), np.int64)


def _planned_capacity(setting: Setting) -> list[int]:
    share = _best_split(setting).resident_share
    return [round(share * slots) for slots in setting.capacity]


def _planned_residents(setting: Setting) -> Placement:
    return Static.favourites(setting.capacity, use_of(_load(setting)))


def _planned_prefetch(setting: Setting) -> Prefetch:
    return Favourites(_best_split(setting).num_ahead, use_of(_load(setting)))


CATALOGUE: dict[str, Recipe] = {
    # Every expert on the device: the machine without a limit.
    "resident": Recipe(_first, capacity=_all_experts),
    # Nothing on the device; the host computes all experts.
    "all-host": Recipe(_first, capacity=_no_experts),
    # Nothing stays; every expert is fetched and dropped.
    "on-demand": Recipe(_first, lambda s: AllFetch(), capacity=_no_experts, fetches_all=True),
    # Keeps what a calibration used most and fetches the others.
    "static": Recipe(_best_known, lambda s: AllFetch(), fetches_all=True),
    # Ours: moves that pay, in idle link time; host, link and device side by side.
    "lowtide": Recipe(
        _lowtide,
        _balance,
        _what_pays,
        options=(TAU, NUM_PREFETCH, MAX_STEP_BYTES),
        capacity=divided,
        weighs_moves=True,
        is_candidate=True,
    ),
    # TIDE: residents refreshed every tau steps, the others on the host.
    "tide": Recipe(
        _tide,
        options=(TAU, WAITS, STARTS_EMPTY),
        waits=WAITS.of,
        fetches_none=True,
        is_candidate=True,
    ),
    # DALI: window cache, greedy assignment, prefetch by residual vectors.
    "dali": Recipe(
        _dali,
        lambda s: Greedy(),
        lambda s: Residual(NUM_PREFETCH.of(s)),
        options=(W_SIZE, U_SIZE, NUM_PREFETCH, SWAP),
        is_candidate=True,
    ),
    # Fiddler: a static set, the others on the host.
    "fiddler": Recipe(
        _best_known,
        lambda s: Fiddler(BY_THRESHOLD.of(s)),
        options=(BY_THRESHOLD,),
        fetches_none=True,
        is_candidate=True,
    ),
    # HybriMoE: score cache, token threshold, prefetch by the next gate.
    "hybrimoe": Recipe(
        lambda s: ScoreCache(s.capacity, s.num_experts),
        lambda s: HybriMoEGreedy() if BY_GREEDY.of(s) else HybriMoEThreshold(s.costs),
        lambda s: NextGate(NUM_PREFETCH.of(s)),
        options=(NUM_PREFETCH, BY_GREEDY),
        is_candidate=True,
    ),
    # Mixtral-Offloading: the experts used last, the others fetched.
    "lru": Recipe(_lru, lambda s: AllFetch(), fetches_all=True, is_candidate=True),
    # llama.cpp, KTransformers: whole layers on the device, whole layers on the host.
    "layer-split": Recipe(
        _first,
        lambda s: LayerSplit(),
        capacity=whole_layers,
        fetches_none=True,
        is_candidate=True,
    ),
    # EdgeMoE: activation frequency, prefetch by activation statistics.
    "edgemoe": Recipe(
        _edgemoe, lambda s: AllFetch(), _statistics, options=(NUM_PREFETCH,), fetches_all=True
    ),
    # MoE-Lightning: the best fixed split, searched before the run.
    "moe-lightning": Recipe(
        _planned_residents,
        lambda s: FixedShare(_best_split(s).fetch_share),
        _planned_prefetch,
        options=(NUM_PREFETCH,),
        capacity=_planned_capacity,
    ),
}
"""Every preset by name. `resident` ignores the capacity it is given."""

CATALOGUE[buddymoe.NAME] = buddymoe.over(dict(CATALOGUE))
