"""Wiring of a machine with a compute device: its two memory plans and its expert runtime.

`engine.py` comes here when there is a device. Knows nothing of models or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from lowtide.core import Costs, MemoryPlan, MoEShape, TierPlan
from lowtide.errors import UnsupportedError, UsageError
from lowtide.experts.device import Device
from lowtide.experts.emulated import EmulatedDevice, check_emulated_options, emulated_speeds
from lowtide.experts.executor import Executor
from lowtide.experts.home import DiskHome, Home, HostHome
from lowtide.experts.hybrid import HostScratch, HybridRuntime
from lowtide.experts.link import Link
from lowtide.experts.loading import Progress
from lowtide.experts.slots import ExpertSlots, SlotLayout, SlotLedger
from lowtide.experts.store import FileReader
from lowtide.experts.transfer import DiskTransfer
from lowtide.memory.arena import Arena
from lowtide.policies.catalogue import Setting
from lowtide.policies.placement import LRU
from lowtide.policies.presets import make_policies
from lowtide.schemas import ExpertTable

DEVICES = ("auto", "cpu", "cuda", "emulated")


def check_device(name: str, options: Mapping[str, str]) -> None:
    """Raises UsageError for a device or an option of one that there is not; needs no model."""
    if name not in DEVICES:
        raise UsageError(f"Device {name!r} is not known; choose one of {', '.join(DEVICES)}.")
    if name == "emulated":
        check_emulated_options(options)
    elif options:
        raise UsageError(
            f"Device options ({', '.join(options)}) belong to --device emulated, not to {name}."
        )
    if name == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            "Device 'cuda': this torch sees no GPU. Choose --device cpu, or install a torch build "
            "for your GPU."
        )


def resolve_device(name: str) -> str:
    """`auto` is the GPU if there is one; an emulated device is never chosen."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


@dataclass(frozen=True, slots=True)
class ExpertSource:
    """A model's experts: their shape, where they lie in its files, and how a slot holds them."""

    shape: MoEShape
    table: ExpertTable
    layout: SlotLayout
    dtype_name: str  # the compute dtype's safetensors name
    layer_bytes: int  # dense weights of one layer, on average
    max_rows: int

    @property
    def num_experts(self) -> int:
        return self.shape.num_layers * self.shape.num_experts

    @property
    def scratch_bytes(self) -> int:
        """What the host's experts need beside weights."""
        num_pairs = self.max_rows * self.shape.num_experts_per_token
        return 2 * num_pairs * self.shape.expert_size * self.layout.dtype.itemsize


def load_runtime(
    source: ExpertSource,
    plan: MemoryPlan,
    tier: TierPlan,
    make_setting: Callable[[Costs], Setting],
    device_options: Mapping[str, str],
    reader: FileReader,
    executor: Executor,
    progress: Progress,
) -> HybridRuntime:
    """The experts of `plan`, which has the device's `tier`: the host's in their home, the
    policy's first residents on the device.

    Raises StorageError, DeviceError, or PlanError when the policy needs more than the plan has.
    """
    device, costs = _open_device(source, tier, device_options)
    try:
        home = _load_home(source, plan, reader, progress)
        num_staging = tier.num_slots - sum(plan.residents_per_layer)
        costs = replace(costs, num_staging=num_staging - num_staging // 2)
        fits = tier.num_slots == source.num_experts
        ledger = SlotLedger(*source.shape[:2], tier.num_slots)
        runtime = HybridRuntime(
            shape=source.shape,
            device=device,
            link=Link(device, ledger, home, costs.link_s, costs.num_staging),
            home=home,
            policies=make_policies(plan.policy, make_setting(costs), everything_fits=fits),
            costs=costs,
            executor=executor,
            scratch=_scratch(source),
        )
        runtime.preload(progress)
    except BaseException:
        device.close()
        raise
    return runtime


def _open_device(
    source: ExpertSource, tier: TierPlan, options: Mapping[str, str]
) -> tuple[Device, Costs]:
    layout = source.layout
    speeds = emulated_speeds(options, layout, source.shape, layout.dtype)
    arena = Arena(tier.num_slots * layout.num_bytes)
    device = EmulatedDevice(arena, layout, tier.num_slots, speeds)
    costs = Costs(
        expert_bytes=layout.num_bytes,
        link_s=speeds.link_s(layout.num_bytes),
        host_s=speeds.device_s.scaled(speeds.host_slowdown),
        device_s=speeds.device_s,
        dense_s=speeds.device_s.scaled(source.layer_bytes / layout.num_bytes),
        sync_s=0.0,
    )
    return device, costs


def _load_home(
    source: ExpertSource, plan: MemoryPlan, reader: FileReader, progress: Progress
) -> Home:
    """The host's slots, filled if all experts have one."""
    tier, shape = plan.host, source.shape
    slots = ExpertSlots(Arena(tier.slot_bytes * tier.num_slots), source.layout)
    transfer = DiskTransfer(reader, source.table, slots, source.dtype_name)
    if tier.num_slots < source.num_experts:
        ledger = SlotLedger(shape.num_layers, shape.num_experts, tier.num_slots)
        placement = LRU(plan.host_residents_per_layer, shape.num_experts)
        return DiskHome(slots, ledger, transfer, placement)
    home = HostHome(slots, shape.num_experts)
    home.fill(transfer, shape.num_layers, progress)
    return home


def _scratch(source: ExpertSource) -> HostScratch:
    num_pairs = source.max_rows * source.shape.num_experts_per_token
    size, dtype = (num_pairs, source.shape.expert_size), source.layout.dtype
    half_bytes = source.scratch_bytes // 2
    arena = Arena(source.scratch_bytes)
    return HostScratch(arena.tensor(0, size, dtype), arena.tensor(half_bytes, size, dtype))
