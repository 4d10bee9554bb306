"""Wiring of a machine with a compute device: the device itself, and what it costs.

`experts.py` comes here when there is a device. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass

from lowtide.core import Costs
from lowtide.devices.cuda import CudaDevice
from lowtide.devices.emulated import EmulatedDevice
from lowtide.devices.emulated_speeds import EmulatedSpeeds, emulated_speeds
from lowtide.engine.opening.config import MAX_PASS_ROWS
from lowtide.engine.opening.model import OpenModel
from lowtide.experts.device import Device
from lowtide.experts.elastic_slots import ElasticSlots
from lowtide.hardware.machine import this_machine
from lowtide.hardware.measure import Measurements, measure_costs
from lowtide.hardware.store import stored_or_measured
from lowtide.memory.arena import Arena, Region
from lowtide.memory.pinned import PinnedMemory
from lowtide.plan import MemoryPlan
from lowtide.threads.executor import HostExecutor


@dataclass(frozen=True, slots=True)
class OpenDevice:
    """A device with its slots, what it costs, and where it copies from fastest."""

    device: Device
    costs: Costs
    make_arena: Callable[[int], Arena]
    close: Callable[[], None]


def open_device(
    opened: OpenModel, plan: MemoryPlan, executor: HostExecutor, lent: ElasticSlots | None
) -> OpenDevice:
    """lent: what the slots of an emulated device lie in where their memory comes and goes."""
    num_slots = plan.fast_tier.num_slots
    if plan.device == "cuda":
        return _open_cuda(opened, num_slots, executor)
    layout, kernels = opened.slot_layout, opened.kernels
    shape, cores_per_expert = opened.config.moe_shape, executor.cores_per_expert
    speeds = emulated_speeds(
        opened.options.device_options, layout, shape, kernels, cores_per_expert
    )
    if lent is None:
        arena: Region = Arena(num_slots * layout.num_bytes)
    else:
        arena, num_slots = lent.arena, lent.ledger.num_slots
    device = EmulatedDevice(arena, layout, num_slots, speeds, kernels, cores_per_expert)
    costs = _emulated_costs(speeds, layout.num_bytes, opened.layer_bytes)
    return OpenDevice(device, costs, Arena, device.close)


def _emulated_costs(speeds: EmulatedSpeeds, expert_bytes: int, layer_bytes: int) -> Costs:
    return Costs(
        expert_bytes=expert_bytes,
        link_s=speeds.link_s(expert_bytes),
        host_s=speeds.host_s,
        device_s=speeds.device_s,
        # Dense layers are the caller's own work, at the speed of this machine.
        dense_s=speeds.device_s.scaled(layer_bytes / expert_bytes / speeds.device_slowdown),
        sync_s=0.0,
    )


def _open_cuda(opened: OpenModel, num_slots: int, executor: HostExecutor) -> OpenDevice:
    """The GPU; what it costs is measured once per model and machine."""
    shape, layout, host_kernels = opened.config.moe_shape, opened.slot_layout, opened.kernels
    kernels = opened.options.kernels

    def make_device(count: int) -> CudaDevice:
        return CudaDevice(shape, layout, count, MAX_PASS_ROWS, pinned, kernels)

    def measure() -> Measurements:
        with pinned.lent(), ExitStack() as stack:
            measured = device
            # The least budgets have no slots; what is measured then is kept for all others, too.
            if num_slots < shape.num_experts_per_token:
                measured = make_device(shape.num_experts_per_token)
                stack.callback(measured.close)
            return measure_costs(
                shape,
                layout,
                executor,
                opened.layer_bytes,
                device=measured,
                make_arena=pinned.make_arena,
                kernels=host_kernels,
            )

    with ExitStack() as undo:
        pinned = undo.enter_context(closing(PinnedMemory()))
        device = undo.enter_context(closing(make_device(num_slots)))
        key = opened.cost_key(this_machine(), host_kernels.name)
        costs = stored_or_measured(key, measure).costs
        close = undo.pop_all().close
    return OpenDevice(device, costs, pinned.make_arena, close)
