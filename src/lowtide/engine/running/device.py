"""Wiring of a machine with a compute device: the device itself, and what it costs.

`experts.py` comes here when there is a device. Knows nothing of requests.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace

from lowtide.devices.cuda import CudaDevice
from lowtide.devices.kind import KINDS, DeviceRequest, OpenDevice
from lowtide.engine.opening.config import MAX_PASS_ROWS
from lowtide.engine.opening.model import OpenModel
from lowtide.experts.elastic_slots import ElasticSlots
from lowtide.hardware.machine import this_machine
from lowtide.hardware.measure import Measurements, measure_costs
from lowtide.hardware.store import stored_or_measured
from lowtide.memory.pinned import PinnedMemory
from lowtide.plan import MemoryPlan
from lowtide.threads.executor import HostExecutor


def open_device(
    opened: OpenModel, plan: MemoryPlan, executor: HostExecutor, lent: ElasticSlots | None
) -> OpenDevice:
    """lent: what the slots of a device on the host lie in where their memory comes and goes."""
    num_slots = plan.fast_tier.num_slots if lent is None else lent.ledger.num_slots
    if plan.device == "cuda":
        return _open_cuda(opened, num_slots, executor)
    request = request_of(opened, num_slots, executor.cores_per_expert)
    if lent is not None:
        request = replace(request, arena=lent.arena)
    return KINDS[plan.device].open(request)


def request_of(opened: OpenModel, num_slots: int, cores_per_expert: int) -> DeviceRequest:
    """Return what a device beside the host is made for."""
    return DeviceRequest(
        opened.config.moe_shape,
        opened.slot_layout,
        opened.kernels,
        num_slots,
        cores_per_expert,
        opened.layer_bytes,
        opened.options.device_options,
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
