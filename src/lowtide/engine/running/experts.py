"""Wires a model's experts: host tier, device tier and runtime."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from lowtide.core import Costs
from lowtide.devices.kind import OpenDevice
from lowtide.engine.opening.config import MAX_PASS_ROWS
from lowtide.engine.opening.facts import ExpertFacts
from lowtide.engine.running.home_memory import HomeMemory, home_slots
from lowtide.experts.batched_experts import BatchedExperts, cores_beside_device
from lowtide.experts.device_executor import DeviceExpertExecutor
from lowtide.experts.device_tier import DeviceTier
from lowtide.experts.host_executor import HostExpertExecutor
from lowtide.experts.host_tier import HostTier
from lowtide.experts.link import Link
from lowtide.experts.paged_slots import PagedSlots
from lowtide.experts.runtime import ExpertRuntime
from lowtide.experts.slots import ExpertSlots, SlotLedger
from lowtide.experts.transfer import DiskTransfer
from lowtide.hardware.machine import best_at_once, this_machine
from lowtide.hardware.store import kept_rates
from lowtide.kernels.reference import Kernels
from lowtide.memory.arena import Arena
from lowtide.plan import MemoryPlan
from lowtide.policies.decision import Policies
from lowtide.policies.presets import recipe
from lowtide.policies.recipe import PolicyInputs
from lowtide.progress import Progress
from lowtide.reading.file_reader import FileReader
from lowtide.threads.executor import Executor, HostExecutor


class ExpertParts(NamedTuple):
    """Parts from which a model's experts are wired."""

    facts: ExpertFacts
    plan: MemoryPlan
    kernels: Kernels  # the host's
    reader: FileReader
    executor: HostExecutor
    lent: PagedSlots | None  # the fast tier's, where their memory comes and goes


MakePolicies = Callable[[HostTier, DeviceTier | None], Policies]


def load_experts(
    parts: ExpertParts,
    open_device: Callable[[], OpenDevice] | None,
    make_policies: MakePolicies,
    progress: Progress,
) -> tuple[ExpertRuntime, HomeMemory | None]:
    """Load a plan's experts, with the policy's first residents in their slots.

    The second, beside a device, moves the memory of host slots. open_device: opens the plan's
    device, if any. Raises StorageError, DeviceError, or PlanError if the policy needs more than the
    plan has.
    """
    home = None
    with ExitStack() as undo:
        experts: HostExpertExecutor | DeviceExpertExecutor
        if open_device is None:
            host, device = _host_tier(parts, Arena, parts.lent), None
            experts = _host_executor(host, parts.kernels, parts.executor)
        else:
            made = open_device()
            undo.callback(made.close)
            slots = _home_slots(parts, made)
            host = _host_tier(parts, made.make_arena, slots)
            if host.is_permanent:
                host.load_all(progress)
            device = _device_tier(parts.plan, made, host, parts.lent)
            if slots is not None and made.keep_first is not None:
                num_residents = sum(parts.plan.host_residents_per_layer)
                num_staging = parts.plan.host.num_slots - num_residents
                home = HomeMemory(slots, host, device, num_staging, made.keep_first)
            beside = _host_executor(host, parts.kernels, parts.executor, made)
            experts = DeviceExpertExecutor(device, beside, _scratch(parts.facts))
        runtime = ExpertRuntime(parts.facts.shape, make_policies(host, device), experts)
        runtime.load(progress)
        undo.pop_all()
    return runtime, home


def _home_slots(parts: ExpertParts, made: OpenDevice) -> PagedSlots | None:
    """Make the host slots beside a device if it leaves their memory free to move."""
    tier = parts.plan.host
    if made.keep_first is None or tier.num_slots == parts.plan.num_experts:
        return None
    return home_slots(tier, parts.facts.shape, made.keep_first)


def _host_tier(
    parts: ExpertParts, make_arena: Callable[[int], Arena], moving: PagedSlots | None
) -> HostTier:
    """Make the host tier. Beside a device it holds all experts if they fit, else the last used."""
    facts, plan = parts.facts, parts.plan
    tier, shape, layout = plan.host, facts.shape, facts.layout
    if moving is None:
        ledger = SlotLedger(shape.num_layers, shape.num_experts, tier.num_slots)
        slots = ExpertSlots(make_arena(tier.slot_bytes * tier.num_slots), layout)
    else:
        ledger, slots = moving.ledger, ExpertSlots(moving.arena, layout)
    num_at_once = best_at_once(kept_rates(this_machine()))
    transfer = DiskTransfer(
        parts.reader, facts.table, slots, facts.inputs, parts.kernels.library, num_at_once
    )
    if plan.gpu is None:
        return HostTier(slots, ledger, transfer)
    if tier.num_slots == plan.num_experts:
        return HostTier(slots, ledger, transfer, is_permanent=True)
    costs = Costs.unknown(layout.num_bytes)
    inputs = PolicyInputs(plan.host_residents_per_layer, shape.num_experts, costs)
    return HostTier(slots, ledger, transfer, recipe("lru").policies_without_device(inputs))


def _device_tier(
    plan: MemoryPlan, made: OpenDevice, host: HostTier, lent: PagedSlots | None
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
        batched = BatchedExperts.of(host.slots, kernels, executor.num_cores)
        return HostExpertExecutor(host, executor, kernels, batched)
    batched = BatchedExperts.of(host.slots, kernels, cores_beside_device(executor))
    return HostExpertExecutor(host, executor, kernels, batched, made.device.host_work)


def _scratch(facts: ExpertFacts) -> tuple[Tensor, Tensor]:
    shape, dtype = facts.shape, facts.layout.dtype
    size = (MAX_PASS_ROWS * shape.num_experts_per_token, shape.expert_size)
    arena = Arena(facts.scratch_bytes)
    return arena.tensor(0, size, dtype), arena.tensor(facts.scratch_bytes // 2, size, dtype)
