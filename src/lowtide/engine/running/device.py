"""Wiring of a machine with a compute device: its two memory plans and its expert runtime.

`wiring.py` comes here when there is a device. Knows nothing of models or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import NamedTuple

from lowtide.core import Costs
from lowtide.devices.cuda import CudaDevice
from lowtide.devices.emulated import EmulatedDevice
from lowtide.devices.emulated_speeds import EmulatedSpeeds, emulated_speeds
from lowtide.engine.planning.expert_source import ExpertSource
from lowtide.experts.device import Device
from lowtide.experts.elastic_slots import LentSlots
from lowtide.hardware.machine import this_machine
from lowtide.hardware.measure import Measurements, measure_costs
from lowtide.hardware.store import CostKey, stored_or_measured
from lowtide.kernels.reference import Kernels
from lowtide.memory.arena import Arena, Region
from lowtide.memory.pinned import PinnedMemory
from lowtide.plan import MemoryPlan, TierPlan
from lowtide.threads.executor import HostExecutor


class DeviceOptions(NamedTuple):
    """What a user says of the device, and what the host beside it computes with."""

    options: Mapping[str, str]  # of an emulated one
    kernels: str
    host_kernels: Kernels


@dataclass(frozen=True, slots=True)
class OpenDevice:
    """A device with its slots, what it costs, and where it copies from fastest."""

    device: Device
    costs: Costs
    make_arena: Callable[[int], Arena]
    close: Callable[[], None]


def open_device(
    source: ExpertSource,
    plan: MemoryPlan,
    tier: TierPlan,
    machine: DeviceOptions,
    executor: HostExecutor,
    lent: LentSlots | None = None,
) -> OpenDevice:
    """lent: what the slots of an emulated device lie in where their memory comes and goes."""
    if plan.device == "cuda":
        return _open_cuda(source, tier, machine, executor)
    layout, kernels = source.layout, machine.host_kernels
    cores_per_expert = executor.cores_per_expert
    speeds = emulated_speeds(
        machine.options, layout, source.shape, layout.dtype, kernels, cores_per_expert
    )
    num_slots = tier.num_slots if lent is None else lent.ledger.num_slots
    arena: Region = Arena(num_slots * layout.num_bytes) if lent is None else lent.arena
    device = EmulatedDevice(arena, layout, num_slots, speeds, kernels, cores_per_expert)
    return OpenDevice(device, _emulated_costs(speeds, source), Arena, device.close)


def _emulated_costs(speeds: EmulatedSpeeds, source: ExpertSource) -> Costs:
    expert_bytes = source.layout.num_bytes
    return Costs(
        expert_bytes=expert_bytes,
        link_s=speeds.link_s(expert_bytes),
        host_s=speeds.host_s,
        device_s=speeds.device_s,
        # Dense layers are the caller's own work, at the speed of this machine.
        dense_s=speeds.device_s.scaled(source.layer_bytes / expert_bytes / speeds.device_slowdown),
        sync_s=0.0,
    )


def _open_cuda(
    source: ExpertSource, tier: TierPlan, machine: DeviceOptions, executor: HostExecutor
) -> OpenDevice:
    """The GPU; what it costs is measured once per model and machine."""
    shape, layout = source.shape, source.layout

    def make_device(num_slots: int) -> CudaDevice:
        return CudaDevice(shape, layout, num_slots, source.max_rows, pinned, machine.kernels)

    def measure() -> Measurements:
        with pinned.lent(), ExitStack() as stack:
            measured = device
            # The least budgets have no slots; what is measured then is kept for all others, too.
            if tier.num_slots < shape.num_experts_per_token:
                measured = make_device(shape.num_experts_per_token)
                stack.callback(measured.close)
            return measure_costs(
                shape,
                layout,
                executor,
                source.layer_bytes,
                device=measured,
                make_arena=pinned.make_arena,
                kernels=machine.host_kernels,
            )

    with ExitStack() as undo:
        pinned = undo.enter_context(closing(PinnedMemory()))
        device = undo.enter_context(closing(make_device(tier.num_slots)))
        key = CostKey.of(
            this_machine(),
            shape,
            layout,
            source.layer_bytes,
            device=f"cuda, {machine.kernels} kernels",  # as `lowtide doctor` stores it
            products=machine.host_kernels.name,
        )
        costs = stored_or_measured(key, measure).costs
        close = undo.pop_all().close
    return OpenDevice(device, costs, pinned.make_arena, close)
