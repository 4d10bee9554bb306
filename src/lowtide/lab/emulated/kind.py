"""`--device emulated`: a second tier with given link and speeds, for tests and comparisons."""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.core import Costs
from lowtide.devices.kind import DeviceKind, DeviceRequest, OpenDevice


def _check_options(options: Mapping[str, str]) -> object:
    from lowtide.lab.emulated.speeds import check_emulated_options

    return check_emulated_options(options)


def _open(request: DeviceRequest) -> OpenDevice:
    from lowtide.lab.emulated.device import EmulatedDevice
    from lowtide.lab.emulated.speeds import emulated_speeds
    from lowtide.memory.arena import Arena

    layout, kernels, cores = request.layout, request.kernels, request.cores_per_expert
    speeds = emulated_speeds(request.options, layout, request.shape, kernels, cores)
    arena = request.arena
    if arena is None:
        arena = Arena(request.num_slots * layout.num_bytes)
    device = EmulatedDevice(arena, layout, request.num_slots, speeds, kernels, cores)
    costs = Costs(
        expert_bytes=layout.num_bytes,
        link_s=speeds.link_s(layout.num_bytes),
        host_s=speeds.host_s,
        device_s=speeds.device_s,
        # Dense layers are the caller's own work, at the speed of this machine.
        dense_s=speeds.device_s.scaled(
            request.layer_bytes / layout.num_bytes / speeds.device_slowdown
        ),
        sync_s=0.0,
    )
    return OpenDevice(device, costs, Arena, device.close, lambda region, num_bytes: None)


EMULATED = DeviceKind(_open, _check_options, is_paced=True, num_host_threads=1)
"""One thread computes as the device, and one beside it as the host."""
