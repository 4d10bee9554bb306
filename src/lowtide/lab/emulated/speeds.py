"""Speeds of an emulated device: measured here, and stretched to a profile's ratios."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from lowtide.core import Curve, MoEShape
from lowtide.errors import UsageError
from lowtide.experts.layout import SlotLayout
from lowtide.files.json_file import meant
from lowtide.hardware.core_speed import measure_device_s
from lowtide.kernels.reference import REFERENCE, Kernels
from lowtide.lab.profiles import load_profile

_PROFILE = "dali-3090"
# Name: least value. What is faster than it is here cannot be had by sleeping.
_OPTIONS: Mapping[str, float] = {
    "link_GBps": 1e-6,
    "link_latency_us": 0.0,
    "host_slowdown": 1.0,
    "device_slowdown": 1.0,
}


@dataclass(frozen=True)
class EmulatedSpeeds:
    """Speeds of an emulated device, in a scaled time that starts from `device_s`."""

    link_bytes_per_s: float
    link_latency_s: float  # of each copy
    host_slowdown: float  # the host's time for an expert of one token over the device's
    device_s: Curve  # one expert on the device
    origin: str = "as given"  # where the ratios are from, for people
    host_curve: Curve | None = None  # one expert on the host; None: that ratio at any token count
    device_slowdown: float = 1.0  # the device's time over that of a core of this machine

    def link_s(self, num_bytes: int) -> float:
        """Return the seconds of one copy."""
        return self.link_latency_s + num_bytes / self.link_bytes_per_s

    @cached_property
    def host_s(self) -> Curve:
        """Seconds of one expert on the host."""
        return self.host_curve or self.device_s.scaled(self.host_slowdown)

    def describe(self) -> str:
        slowly = f"device as {self.device_slowdown:.3g} times a core's time, "
        return (
            f"emulated: link {self.link_bytes_per_s / 1e9:.3g} GB/s + "
            f"{self.link_latency_s * 1e6:.0f} us, {slowly if self.device_slowdown > 1 else ''}"
            f"host {self.host_slowdown:.1f}x slower than the device at one token ({self.origin})"
        )


def check_emulated_options(options: Mapping[str, str]) -> dict[str, float]:
    """Parse `device_options` to speeds by name; needs no model.

    `link_GBps` and `link_latency_us`: of the emulated link. `host_slowdown`: the host's time for an
    expert over the device's, at any token count. `device_slowdown`: the device's over that of a
    core of this machine. Raises UsageError.
    """
    values = {}
    for name, text in options.items():
        if name not in _OPTIONS:
            known, near = ", ".join(_OPTIONS), meant(name, _OPTIONS)
            raise UsageError(f"The emulated device has no option {name!r}; choose {known}.{near}")
        values[name] = _number(name, text)
    return values


def _number(name: str, text: str) -> float:
    least = _OPTIONS[name]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= least):
        raise UsageError(f"Device option {name} must be a number from {least:g}, not {text!r}.")
    return value


def emulated_speeds(
    options: Mapping[str, str],
    layout: SlotLayout,
    shape: MoEShape,
    kernels: Kernels = REFERENCE,
    cores_per_expert: int = 1,
) -> EmulatedSpeeds:
    """Return speeds for a model's experts: the device's measured here, others by the profile.

    All of the profile's times are stretched by one factor, so that the device's time for an expert
    with one token is that of a core of this machine, or `device_slowdown` times that. With more
    tokens the host falls behind as in the profile, where arithmetic limits it before the device.
    `options` replace parts (see `check_emulated_options`). Takes about 0.3 s. Raises UsageError.
    """
    given = check_emulated_options(options)
    device_slowdown = given.get("device_slowdown", 1.0)
    core_s = measure_device_s(layout, shape, kernels, cores_per_expert)
    device_s = core_s.scaled(device_slowdown)
    profile = load_profile(_PROFILE)
    costs = profile.costs(shape, layout.dtype.itemsize)
    stretch = device_s.at(1) / costs.device_s.at(1)
    values = {
        "link_GBps": costs.expert_bytes / costs.link_s / 1e9 / stretch,
        "link_latency_us": 0.0,  # in the time of an expert already
        "host_slowdown": costs.host_s.at(1) / costs.device_s.at(1),
        **given,
    }
    origin = f"{profile.name}, scaled"
    return EmulatedSpeeds(
        link_bytes_per_s=1e9 * values["link_GBps"],
        link_latency_s=1e-6 * values["link_latency_us"],
        host_slowdown=values["host_slowdown"],
        device_s=device_s,
        origin=f"{origin}; as given: {', '.join(given)}" if given else origin,
        host_curve=None if "host_slowdown" in given else costs.host_s.scaled(stretch),
        device_slowdown=device_slowdown,
    )
