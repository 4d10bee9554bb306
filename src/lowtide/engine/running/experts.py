"""Wiring of a model's experts: the host tier, the device's on top of it, and what runs them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from torch import Tensor

from lowtide.core import Costs
from lowtide.devices.kind import OpenDevice
from lowtide.engine.opening.config import MAX_PASS_ROWS
from lowtide.engine.opening.model import OpenModel
from lowtide.engine.running.device import open_device
from lowtide.engine.running.elastic import SharedMemory
from lowtide.engine.running.policy_setting import make_engine_policies
from lowtide.experts.at_once import ExpertsAtOnce, cores_beside_device
from lowtide.experts.device_executor import DeviceExpertExecutor
from lowtide.experts.device_tier import DeviceTier
from lowtide.experts.elastic_slots import ElasticSlots
from lowtide.experts.host_executor import HostExpertExecutor
from lowtide.experts.host_tier import HostTier
from lowtide.experts.link import Link
from lowtide.experts.runtime import ExpertRuntime
from lowtide.experts.slots import ExpertSlots, SlotLedger
from lowtide.experts.transfer import DiskTransfer
from lowtide.hardware.machine import best_at_once, this_machine
from lowtide.hardware.store import kept_rates
from lowtide.kernels.reference import Kernels
from lowtide.memory.arena import Arena
from lowtide.plan import MemoryPlan
from lowtide.policies.presets import recipe
from lowtide.policies.recipe import Setting
from lowtide.reading.file_reader import FileReader
from lowtide.replay.calibration import Calibration
from lowtide.threads.executor import Executor, HostExecutor


def load_experts(
    opened: OpenModel,
    plan: MemoryPlan,
    calibration: Calibration | None,
    reader: FileReader,
    executor: HostExecutor,
    shared: SharedMemory | None,
) -> ExpertRuntime:
    """The experts of `plan`, the policy's first residents in their slots.

    shared: what the fast tier's slots lie in where their memory comes and goes. Raises
    StorageError, DeviceError, or PlanError when the policy needs more than the plan has.
    """
    shape, kernels, progress = opened.config.moe_shape, opened.kernels, opened.options.report
    lent = None if shared is None else shared.open_slots(shape)
    with ExitStack() as undo:
        if plan.gpu is None:
            host, device = _host_tier(opened, plan, Arena, reader, lent), None
            experts: HostExpertExecutor | DeviceExpertExecutor
            experts = _host_executor(host, kernels, executor)
        else:
            made = open_device(opened, plan, executor, lent)
            undo.callback(made.close)
            host = _host_tier(opened, plan, made.make_arena, reader)
            if host.is_permanent:
                host.load_all(progress)
            device = _device_tier(plan, made, host, lent)
            beside = _host_executor(host, kernels, executor, made)
            experts = DeviceExpertExecutor(device, beside, _scratch(opened))
        policies = make_engine_policies(
            opened, plan, calibration, host, device, executor.cores_per_expert
        )
        runtime = ExpertRuntime(shape, policies, experts)
        runtime.load(progress)
        undo.pop_all()
    return runtime


def _host_tier(
    opened: OpenModel,
    plan: MemoryPlan,
    make_arena: Callable[[int], Arena],
    reader: FileReader,
    lent: ElasticSlots | None = None,
) -> HostTier:
    """Beside a device it keeps every expert if all have a slot, else those used last."""
    tier, shape, layout = plan.host, opened.config.moe_shape, opened.slot_layout
    if lent is None:
        ledger = SlotLedger(shape.num_layers, shape.num_experts, tier.num_slots)
        slots = ExpertSlots(make_arena(tier.slot_bytes * tier.num_slots), layout)
    else:
        ledger, slots = lent.ledger, ExpertSlots(lent.arena, layout)
    table, library = opened.weight_map.experts, opened.kernels.library
    num_at_once = best_at_once(kept_rates(this_machine()))
    transfer = DiskTransfer(reader, table, slots, opened.inputs, library, num_at_once)
    if plan.gpu is None:
        return HostTier(slots, ledger, transfer)
    if tier.num_slots == plan.num_experts:
        return HostTier(slots, ledger, transfer, is_permanent=True)
    costs = Costs.unknown(layout.num_bytes)
    setting = Setting(plan.host_residents_per_layer, shape.num_experts, costs)
    return HostTier(slots, ledger, transfer, recipe("lru").policies_without_device(setting))


def _device_tier(
    plan: MemoryPlan, made: OpenDevice, host: HostTier, lent: ElasticSlots | None
) -> DeviceTier:
    num_ahead = plan.num_staging // 2
    costs = replace(made.costs, num_staging=plan.num_staging - num_ahead, num_ahead=num_ahead)
    home, num_slots = host.ledger, plan.fast_tier.num_slots
    ledger = lent.ledger if lent else SlotLedger(home.num_layers, home.num_experts, num_slots)
    link = Link(made.device, ledger, host, costs.link_s, costs.num_staging)
    return DeviceTier(made.device, link, costs, made.close)


def _host_executor(
    host: HostTier, kernels: Kernels, executor: Executor, made: OpenDevice | None = None
) -> HostExpertExecutor:
    if made is None:
        at_once = ExpertsAtOnce.of(host.slots, kernels, executor.num_cores)
        return HostExpertExecutor(host, executor, kernels, at_once)
    at_once = ExpertsAtOnce.of(host.slots, kernels, cores_beside_device(executor))
    return HostExpertExecutor(host, executor, kernels, at_once, made.device.host_work)


def _scratch(opened: OpenModel) -> tuple[Tensor, Tensor]:
    shape = opened.config.moe_shape
    size = (MAX_PASS_ROWS * shape.num_experts_per_token, shape.expert_size)
    half_bytes = opened.host_scratch_bytes // 2
    arena = Arena(opened.host_scratch_bytes)
    return arena.tensor(0, size, opened.dtype), arena.tensor(half_bytes, size, opened.dtype)
