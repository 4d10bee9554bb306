"""The names promised to code that adds a policy, a device, a format or a family.

    from lowtide.extend import Placement, Ranks, Recipe, register_policy

A registered name is known to this process; a distribution's entry points (`lowtide.policies`,
`lowtide.devices`, `lowtide.verbs`) are known wherever it is installed.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in the package's own __init__
if TYPE_CHECKING:
    from lowtide.core import Assignment as Assignment
    from lowtide.core import Costs as Costs
    from lowtide.core import Curve as Curve
    from lowtide.core import Facts as Facts
    from lowtide.core import RoutedTokens as RoutedTokens
    from lowtide.core import Step as Step
    from lowtide.devices.kind import DeviceKind as DeviceKind
    from lowtide.devices.kind import DeviceRequest as DeviceRequest
    from lowtide.devices.kind import OpenDevice as OpenDevice
    from lowtide.devices.kind import register_device as register_device
    from lowtide.experts.device import Device as Device
    from lowtide.families.family import Family as Family
    from lowtide.families.registry import register as register_family
    from lowtide.formats.matrix import MatrixFormat as MatrixFormat
    from lowtide.formats.registry import register as register_format
    from lowtide.policies.placement import Placement as Placement
    from lowtide.policies.presets import register as register_policy
    from lowtide.policies.ranks import Ranks as Ranks
    from lowtide.policies.recipe import PolicyInputs as PolicyInputs
    from lowtide.policies.recipe import PolicyOption as PolicyOption
    from lowtide.policies.recipe import Recipe as Recipe
    from lowtide.policies.substitution import Substitution as Substitution

_HOMES = {
    "Assignment": "core.Assignment",
    "Costs": "core.Costs",
    "Curve": "core.Curve",
    "Device": "experts.device.Device",
    "DeviceKind": "devices.kind.DeviceKind",
    "DeviceRequest": "devices.kind.DeviceRequest",
    "Facts": "core.Facts",
    "Family": "families.family.Family",
    "MatrixFormat": "formats.matrix.MatrixFormat",
    "OpenDevice": "devices.kind.OpenDevice",
    "Placement": "policies.placement.Placement",
    "PolicyOption": "policies.recipe.PolicyOption",
    "Ranks": "policies.ranks.Ranks",
    "Recipe": "policies.recipe.Recipe",
    "RoutedTokens": "core.RoutedTokens",
    "PolicyInputs": "policies.recipe.PolicyInputs",
    "Step": "core.Step",
    "Substitution": "policies.substitution.Substitution",
    "register_device": "devices.kind.register_device",
    "register_family": "families.registry.register",
    "register_format": "formats.registry.register",
    "register_policy": "policies.presets.register",
}
"""Name -> module, imported on first use: `Device` needs torch, a simulated policy does not."""

__all__ = [  # noqa: F822 - those of `_HOMES`, as a test promises
    "Assignment",
    "Costs",
    "Curve",
    "Device",
    "DeviceKind",
    "DeviceRequest",
    "Facts",
    "Family",
    "MatrixFormat",
    "OpenDevice",
    "Placement",
    "PolicyOption",
    "Ranks",
    "Recipe",
    "RoutedTokens",
    "PolicyInputs",
    "Step",
    "Substitution",
    "register_device",
    "register_family",
    "register_format",
    "register_policy",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, _, own = _HOMES[name].rpartition(".")
    return import_module(f"lowtide.{module}").__dict__[own]


def __dir__() -> list[str]:
    return sorted(__all__)
