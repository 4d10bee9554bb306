"""Presets: the names a user gives to policies, and their options."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lowtide.core import BoolArray, Demand, IntArray, Moves, Step
from lowtide.errors import UsageError
from lowtide.policies.catalogue import Setting, recipe
from lowtide.policies.decision import Policies
from lowtide.policies.placement import KeepsFetched, Placement

PRESETS: Mapping[str, tuple[str, ...]] = {
    "auto": ("tau",),
    "resident": (),
    "all-host": (),
    "on-demand": (),
    "static": (),
    "tide": ("tau", "waits"),
    "dali": ("w_size", "u_size", "num_prefetch"),
    "lowtide": ("tau", "num_prefetch", "max_step_bytes"),
    "lru": (),
    "fiddler": ("by_threshold",),
    "hybrimoe": ("num_prefetch", "by_greedy"),
    "edgemoe": ("num_prefetch",),
    "layer-split": (),
    "moe-lightning": ("num_prefetch",),
}
"""Every preset with the names of its options."""

FETCHING = ("on-demand", "static", "lru", "edgemoe")
"""Presets that fetch every absent expert, and so cannot be without a staging slot."""

CANDIDATES = ("lowtide", "tide", "dali", "fiddler", "hybrimoe", "lru", "layer-split")
"""Presets that `auto` compares where it can simulate them; of equals the first."""

_RANGES: Mapping[str, tuple[int, int]] = {
    "tau": (1, 999_999),
    "w_size": (1, 999_999),
    "u_size": (0, 999_999),
    "num_prefetch": (0, 999_999),
    "max_step_bytes": (1, 10**15),
}
_SWITCHES: Mapping[str, bool] = {"true": True, "false": False}
_SWITCHED = ("waits", "by_threshold", "by_greedy")
_ONLINE = "auto"  # tau follows the drift that is seen
TAU_PAPER = "paper"  # tau is TIDE's Eq. 7, from a calibration
TAU_SOLVED = (_ONLINE, TAU_PAPER)
"""Values of tau that are solved for with the machine's costs."""


def check_policy(name: str, options: Mapping[str, str]) -> None:
    """Raises UsageError for an unknown preset, option or value; needs no model."""
    if name not in PRESETS:
        raise UsageError(f"Policy {name!r} is not known; choose one of {', '.join(PRESETS)}.")
    for option in options:
        if option not in PRESETS[name]:
            known = ", ".join(PRESETS[name]) or "none"
            raise UsageError(f"Policy {name!r} has no option {option!r}; its options: {known}.")
    parse_options(options)


def parse_options(options: Mapping[str, str]) -> dict[str, int | bool]:
    """A policy's options as fields of `Setting`; `tau=paper` is the caller's to solve."""
    parsed: dict[str, int | bool] = {}
    for name, value in options.items():
        text = str(value)
        if name == "tau" and text == _ONLINE:
            parsed["online_tau"] = True
            continue
        if name == "tau" and text == TAU_PAPER:
            continue
        if name in _SWITCHED:
            parsed[name] = _switch(name, text)
            continue
        low, high = _RANGES[name]
        if not text.isdecimal() or len(text) > 16 or not low <= int(text) <= high:
            word = ", or auto, or paper" if name == "tau" else ""
            raise UsageError(
                f"{name} must be a whole number from {low} to {high}{word}, not {text!r}."
            )
        parsed[name] = int(text)
    return parsed


def _switch(name: str, text: str) -> bool:
    if text not in _SWITCHES:
        raise UsageError(f"{name} must be true or false, not {text!r}.")
    return _SWITCHES[text]


def choose_preset(
    name: str, *, everything_fits: bool, has_device: bool = False, is_diffusion: bool = True
) -> tuple[str, str]:
    """The preset that `name` stands for here, and the reason."""
    if name == "auto":
        if everything_fits:
            return "resident", "every expert fits into the budget"
        if has_device:
            return "lowtide", "not every expert fits: measured costs decide who computes what"
        if is_diffusion:
            return "tide", "not every expert fits, and routing changes little from step to step"
        # TIDE would keep the few experts of one token and leave the other slots empty.
        return "lru", "not every expert fits, and each token asks for a few experts only"
    if name == "resident" and not everything_fits:
        raise UsageError(
            "Policy 'resident' keeps every expert in memory and the budget is too small for that; "
            "raise it to the plan's full_bytes or choose --policy tide."
        )
    return name, "asked for"


def make_policies(preset: str, setting: Setting, *, everything_fits: bool) -> Policies:
    """The policies of a preset; with room for every expert there is nothing to decide."""
    return recipe("resident" if everything_fits else preset).policies(setting)


class OnDemand:
    """A preset's placement on a machine with one processor: every absent expert is read anyway.

    Keeps those of its moves that admit experts of the present demand; for others there is no idle
    link here, and the policy will ask again.
    """

    def __init__(self, inner: Placement) -> None:
        self._inner = inner
        self._keeper = inner if isinstance(inner, KeepsFetched) else None

    def initial(self, layer: int) -> IntArray:
        return self._inner.initial(layer)

    def update(self, step: Step, layer: int, demand: Demand, is_resident: BoolArray) -> Moves:
        if self._keeper is not None:
            self._keeper.fetched(layer, demand.experts[~demand.is_resident])
        moves = self._inner.update(step, layer, demand, is_resident)
        if not len(moves.admit):
            return moves
        admit = moves.admit[np.isin(moves.admit, demand.experts)]
        num_left_out = len(moves.admit) - len(admit)
        return Moves(admit, moves.evict[num_left_out:])
