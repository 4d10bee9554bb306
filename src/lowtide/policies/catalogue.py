"""The catalogue: every preset with its complete recipe.

All presets share the mechanisms, so comparing presets compares policies. These are the engine's
own; others are registered (`lowtide.extend`), baselines by `lowtide.lab.baselines`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, cast

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
from lowtide.policies.recipe import MAX_WHOLE, PolicyInputs, PolicyOption, Recipe, switch
from lowtide.policies.tau import FollowDrift, SolvedTau
from lowtide.registry import POLICIES, Registry

# TIDE's interval, in steps: auto follows the demand, paper is its Eq. 7.
TAU: PolicyOption[int | FollowDrift | SolvedTau] = PolicyOption(
    "tau", 4, 1, MAX_WHOLE, {"auto": FollowDrift(), "paper": SolvedTau.PAPER}
)
WAITS = switch("waits")  # a refresh, for what it admits; else the moves follow
STARTS_EMPTY = switch("starts_empty")  # prompts refresh nothing: no expert is resident at first
W_SIZE = PolicyOption("w_size", 4, 1, MAX_WHOLE)  # steps of a window
# Residents that a window may swap and experts prefetched, at most; by default `dali_sizes`.
U_SIZE: PolicyOption[int | None] = PolicyOption("u_size", None, 0, MAX_WHOLE)
DALI_PREFETCH: PolicyOption[int | None] = PolicyOption("num_prefetch", None, 0, MAX_WHOLE)
# Whether all of them are swapped, as printed, or only those that score less than who comes.
SWAP = PolicyOption("swap", True, words={"always": True, "better": False})
NUM_PREFETCH = PolicyOption("num_prefetch", 4, 0, MAX_WHOLE)  # of a layer, at most
# Moves of a forward pass, at most; any number unless given.
MAX_STEP_BYTES: PolicyOption[int | None] = PolicyOption("max_step_bytes", None, 1, 10**15)
_MIXTRALS_EXPERTS = 8


class DaliSizes(NamedTuple):
    """Sizes of DALI's cache and prefetch."""

    w_size: int
    u_size: int
    num_prefetch: int


def dali_sizes(options: Mapping[str, object], num_experts: int) -> DaliSizes:
    """Return the sizes asked for, and otherwise those that the paper uses (6.1, A.6).

    They are Mixtral's in layers of at most 8 experts, else DeepSeek's and Qwen's.
    """
    is_small = num_experts <= _MIXTRALS_EXPERTS
    own = {W_SIZE.name: W_SIZE.default, U_SIZE.name: 1 if is_small else 8}
    own |= {DALI_PREFETCH.name: 1 if is_small else 4}
    return DaliSizes(*(cast(int, options.get(name, size)) for name, size in own.items()))


def _dali_sizes_text(options: Mapping[str, object], num_experts: int, has_device: bool) -> str:
    w_size, u_size, num_prefetch = dali_sizes(options, num_experts)
    ahead = f", {num_prefetch} prefetched" if has_device else ""
    return f"{u_size} swapped every {w_size} passes{ahead}"


def first_experts(inputs: PolicyInputs) -> Placement:
    return Static.first(inputs.capacity, inputs.num_experts)


def _all_experts(inputs: PolicyInputs) -> list[int]:
    return [inputs.num_experts] * inputs.num_layers


def _lru(inputs: PolicyInputs) -> Placement:
    return LRU(inputs.num_layers, inputs.num_experts)


def _tide(inputs: PolicyInputs) -> Placement:
    starts_empty = STARTS_EMPTY.of(inputs)
    tau = tau_of(inputs, WAITS.of(inputs))
    return Tide(inputs.num_layers, inputs.num_experts, tau, starts_empty)


def _dali(inputs: PolicyInputs) -> Placement:
    w_size, u_size, _ = dali_sizes(inputs.options, inputs.num_experts)
    capacity, always = inputs.capacity, SWAP.of(inputs)
    return DaliWindow(capacity, inputs.num_experts, w_size, u_size, inputs.seed, always)


def _lowtide(inputs: PolicyInputs) -> Placement:
    return Lowtide(
        inputs.capacity,
        inputs.num_experts,
        inputs.costs,
        tau=tau_of(inputs, waits=False),
        max_step_bytes=MAX_STEP_BYTES.of(inputs),
        frequency=inputs.frequency,
    )


def tau_of(inputs: PolicyInputs, waits: bool) -> int | OnlineTau:
    """Return the interval; waits: a refresh waits for what it admits.

    Raises UsageError for `tau=paper` that is not solved.
    """
    tau = TAU.of(inputs)
    if isinstance(tau, SolvedTau):
        raise UsageError(f"tau={tau.value} is to be solved from a calibration first.")
    if isinstance(tau, int):
        return tau
    num_layers = inputs.num_layers  # of which four are watched
    return OnlineTau(
        inputs.num_experts,
        max(1, round(sum(inputs.capacity) / num_layers)),
        inputs.costs,
        waits=waits,
        tau=tau.start,
        watched=range(0, num_layers, max(1, num_layers // 4)),
        on_change=inputs.on_tau_change,
    )


def _what_pays(inputs: PolicyInputs) -> Prefetch:
    """Combine the next gate with the previous step, as long as prefetching pays."""
    num_ahead = NUM_PREFETCH.of(inputs)
    is_calibrated = inputs.frequency is not None  # and so has residual vectors
    gate = Residual(num_ahead) if is_calibrated else NextGate(num_ahead)
    last = PreviousStep(num_ahead, inputs.num_layers, inputs.num_experts)
    return PaysOff(Combined(num_ahead, gate, last))


def _balance(inputs: PolicyInputs) -> Assign:
    return Balance() if inputs.twins is None else inputs.twins.balance()


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
        lambda s: Residual(dali_sizes(s.options, s.num_experts).num_prefetch),
        options=(W_SIZE, U_SIZE, DALI_PREFETCH, SWAP),
        sizes=_dali_sizes_text,
    ),
    # Mixtral-Offloading: the experts used last, the others fetched.
    "lru": Recipe(_lru, lambda s: AllFetch(), fetches_all=True),
}

CATALOGUE: Registry[Recipe] = Registry(POLICIES, "policy", Recipe, _OWN)
"""Every preset by name. `resident` ignores the capacity it is given."""

CATALOGUE[buddymoe.NAME] = buddymoe.over(CATALOGUE)
