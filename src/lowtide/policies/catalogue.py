"""The catalogue: every preset, each with all that it is.

Presets share all mechanisms, so comparing presets compares policies. Here are the engine's own;
others are registered (`lowtide.extend`), the baselines by `lowtide.lab.baselines`.
"""

from __future__ import annotations

from lowtide.errors import UsageError
from lowtide.policies import buddymoe
from lowtide.policies.assignment import AllFetch, Assign, Balance, Greedy
from lowtide.policies.division import divided
from lowtide.policies.lowtide import Lowtide
from lowtide.policies.online_tau import OnlineTau
from lowtide.policies.placement import LRU, DaliWindow, Placement, Static, Tide
from lowtide.policies.prefetch import (
    Combined,
    NextGate,
    PaysOff,
    Prefetch,
    PreviousStep,
    Residual,
)
from lowtide.policies.recipe import MAX_WHOLE, PolicyOption, Recipe, Setting, switch
from lowtide.policies.tau import FollowDrift, SolvedTau
from lowtide.registry import POLICIES, Registry

# TIDE's interval, in steps: auto follows the demand, paper is its Eq. 7.
TAU: PolicyOption[int | FollowDrift | SolvedTau] = PolicyOption(
    "tau", 4, 1, MAX_WHOLE, {"auto": FollowDrift(), "paper": SolvedTau.PAPER}
)
WAITS = switch("waits")  # a refresh, for what it admits; else the moves follow
STARTS_EMPTY = switch("starts_empty")  # prompts refresh nothing: no expert is resident at first
W_SIZE = PolicyOption("w_size", 4, 1, MAX_WHOLE)  # steps of a window
U_SIZE = PolicyOption("u_size", 8, 0, MAX_WHOLE)  # residents that a window may swap, at most
# Whether all of them are swapped, as printed, or only those that score less than who comes.
SWAP = PolicyOption("swap", True, words={"always": True, "better": False})
NUM_PREFETCH = PolicyOption("num_prefetch", 4, 0, MAX_WHOLE)  # of a layer, at most
# Moves of a forward pass, at most; any number unless given.
MAX_STEP_BYTES: PolicyOption[int | None] = PolicyOption("max_step_bytes", None, 1, 10**15)


def first_experts(setting: Setting) -> Placement:
    return Static.first(setting.capacity, setting.num_experts)


def _all_experts(setting: Setting) -> list[int]:
    return [setting.num_experts] * setting.num_layers


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


def _balance(setting: Setting) -> Assign:
    return Balance() if setting.twins is None else setting.twins.balance()


_OWN: dict[str, Recipe] = {
    # Every expert on the device: the machine without a limit.
    "resident": Recipe(first_experts, capacity=_all_experts),
    # Ours: moves that pay, in idle link time; host, link and device side by side.
    "lowtide": Recipe(
        _lowtide,
        _balance,
        _what_pays,
        options=(TAU, NUM_PREFETCH, MAX_STEP_BYTES),
        capacity=divided,
        weighs_moves=True,
    ),
    # TIDE: residents refreshed every tau steps, the others on the host.
    "tide": Recipe(
        _tide,
        options=(TAU, WAITS, STARTS_EMPTY),
        waits=WAITS.of,
    ),
    # DALI: window cache, greedy assignment, prefetch by residual vectors.
    "dali": Recipe(
        _dali,
        lambda s: Greedy(),
        lambda s: Residual(NUM_PREFETCH.of(s)),
        options=(W_SIZE, U_SIZE, NUM_PREFETCH, SWAP),
    ),
    # Mixtral-Offloading: the experts used last, the others fetched.
    "lru": Recipe(_lru, lambda s: AllFetch(), fetches_all=True),
}

CATALOGUE: Registry[Recipe] = Registry(POLICIES, "preset", Recipe, _OWN)
"""Every preset by name. `resident` ignores the capacity it is given."""

CATALOGUE[buddymoe.NAME] = buddymoe.over(CATALOGUE)
