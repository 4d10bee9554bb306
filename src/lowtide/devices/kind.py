"""Kinds of devices beside the host, by their `--device` names. Imports no torch.

`cpu` and `cuda` are built in; all others are registered here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowtide.core import Costs, MoEShape
from lowtide.errors import UsageError
from lowtide.registry import DEVICES, Registry

if TYPE_CHECKING:
    from lowtide.experts.device import Device
    from lowtide.experts.layout import SlotLayout
    from lowtide.experts.slots import ExpertSlots
    from lowtide.kernels.reference import Kernels
    from lowtide.memory.arena import Arena, Region

OWN_DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """Request for a device: the experts of one model, and slots for some of them."""

    shape: MoEShape
    layout: SlotLayout  # of a slot
    kernels: Kernels  # of the host
    num_slots: int
    cores_per_expert: int  # of the host: an expert has the same bits on either side
    layer_bytes: int  # of a layer's weights without experts
    options: Mapping[str, str]
    arena: Region | None = None
    """Memory that the slots must lie in, slot i at i * `layout.num_bytes`, as it comes and goes: a
    copy is tried once the device is open. None: the device allocates its own."""

    def open_slots(self) -> ExpertSlots:
        """Return the slots, in memory of the host."""
        from lowtide.experts.slots import ExpertSlots

        num_bytes = self.num_slots * self.layout.num_bytes
        return ExpertSlots(self.arena or self.make_arena(num_bytes), self.layout)

    @staticmethod
    def make_arena(num_bytes: int) -> Arena:
        """Return memory of the host, such as experts are copied from."""
        from lowtide.memory.arena import Arena

        return Arena(num_bytes)


@dataclass(frozen=True, slots=True)
class OpenDevice:
    """A device with its slots and costs, and the host memory from which it copies fastest."""

    device: Device
    costs: Costs
    make_arena: Callable[[int], Arena]
    close: Callable[[], None]
    keep_first: Callable[[Region, int], object] | None = None
    """Makes the first bytes of a region such as `make_arena` gives, and no others, while no copy is
    under way; None: the memory of the host's slots stays."""


def no_options(options: Mapping[str, str]) -> object:
    """Raise UsageError for any option; the check of a device that has none."""
    if options:
        raise UsageError(f"`device_options` {', '.join(options)}: this device has none.")
    return None


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A kind of device, by its `--device` name; it runs experts only and uses the host's tensors.

    check_options: raises UsageError for unknown options; needs no model and no torch. is_paced:
    speeds are given, so none is predicted or stored. num_host_threads: threads of the host's
    experts beside it; None: as without a device.
    """

    open: Callable[[DeviceRequest], OpenDevice]
    check_options: Callable[[Mapping[str, str]], object] = no_options
    is_paced: bool = False
    num_host_threads: int | None = None


KINDS: Registry[DeviceKind] = Registry(DEVICES, "device", DeviceKind, {})


def register_device(name: str, kind: DeviceKind) -> None:
    """Add a kind of device; raises UsageError for a name that is taken."""
    if name in OWN_DEVICES:
        raise UsageError(f"There is a device {name!r} already; choose another name.")
    KINDS.register(name, kind)


def is_paced(name: str) -> bool:
    """Return True if the device of this name keeps to given speeds."""
    return name not in OWN_DEVICES and KINDS[name].is_paced
