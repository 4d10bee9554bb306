"""Presets: the names a user gives to policies, and their options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lowtide.errors import UsageError
from lowtide.policies.placement import LRU, Placement, Static, Tide

DEFAULT_TAU = 4

PRESETS: Mapping[str, tuple[str, ...]] = {
    "auto": ("tau",),
    "resident": (),
    "tide": ("tau",),
    "lru": (),
    "static": (),
}
"""Every preset with the names of its options."""


def check_policy(name: str, options: Mapping[str, str]) -> None:
    """Raises UsageError for an unknown preset, option or value; needs no model."""
    if name not in PRESETS:
        raise UsageError(f"Policy {name!r} is not known; choose one of {', '.join(PRESETS)}.")
    for option in options:
        if option not in PRESETS[name]:
            known = ", ".join(PRESETS[name]) or "none"
            raise UsageError(f"Policy {name!r} has no option {option!r}; its options: {known}.")
    parse_tau(options)


def choose_preset(name: str, *, everything_fits: bool) -> tuple[str, str]:
    """The preset that `name` stands for here, and the reason."""
    if name == "auto":
        if everything_fits:
            return "resident", "every expert fits into the budget"
        return "tide", "not every expert fits, and routing changes little from step to step"
    if name == "resident" and not everything_fits:
        raise UsageError(
            "Policy 'resident' keeps every expert in memory and the budget is too small for that; "
            "raise --host-memory to the plan's full_bytes or choose --policy tide."
        )
    return name, "asked for"


def make_placement(
    preset: str, options: Mapping[str, str], capacity: Sequence[int], num_experts: int
) -> Placement:
    """The placement policy of a preset, for `capacity[layer]` residents per MoE layer."""
    if preset == "tide":
        return Tide(capacity, num_experts, parse_tau(options))
    if preset == "lru":
        return LRU(capacity, num_experts)
    return Static.first(capacity)


def parse_tau(options: Mapping[str, str]) -> int:
    """The refresh interval in denoising steps."""
    text = str(options.get("tau", DEFAULT_TAU))
    if not text.isdecimal() or not 1 <= len(text) <= 6 or int(text) < 1:
        raise UsageError(f"tau must be a whole number of steps from 1 to 999999, not {text!r}.")
    return int(text)
