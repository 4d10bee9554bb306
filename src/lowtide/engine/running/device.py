"""Opens a compute device, and measures its costs.

`wiring.py` uses this if the plan has a device. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

from lowtide.config import format_size
from lowtide.devices.cuda import CudaDevice
from lowtide.devices.kind import KINDS, DeviceRequest, OpenDevice
from lowtide.engine.opening.config import MAX_PASS_ROWS
from lowtide.engine.opening.facts import ExpertFacts
from lowtide.engine.running.experts import ExpertParts
from lowtide.errors import DeviceError
from lowtide.experts.paged_slots import PagedSlots
from lowtide.hardware.machine import this_machine
from lowtide.hardware.measure import Measurements, measure_costs
from lowtide.hardware.store import stored_or_measured
from lowtide.kernels.reference import Kernels
from lowtide.memory.pinned import PinnedMemory
from lowtide.threads.executor import HostExecutor

_PROBE = 0x5A
"""Byte of an image that is copied into a slot to see where it arrives; new memory is zeros."""


def device_opener(
    parts: ExpertParts, kernels: str, options: Mapping[str, str]
) -> Callable[[], OpenDevice] | None:
    """Return a function that opens the plan's device, or None if there is none.

    kernels: the option. options: of the device.
    """
    facts, plan, executor, lent = parts.facts, parts.plan, parts.executor, parts.lent
    num_slots = plan.fast_tier.num_slots if lent is None else lent.ledger.max_slots
    if plan.device == "cuda":
        return partial(_open_cuda, facts, num_slots, kernels, parts.kernels, executor)
    if plan.device == "cpu":
        return None
    cores = executor.cores_per_expert
    request = request_of(facts, num_slots, parts.kernels, cores, options)
    if lent is None:
        return partial(KINDS[plan.device].open, request)
    return partial(_open_over, plan.device, replace(request, arena=lent.arena), lent)


def request_of(
    experts: ExpertFacts,
    num_slots: int,
    kernels: Kernels,
    cores_per_expert: int,
    options: Mapping[str, str],
) -> DeviceRequest:
    """Describe the experts and slots for which a device is made. kernels: the host's."""
    return DeviceRequest(
        experts.shape,
        experts.layout,
        kernels,
        num_slots,
        cores_per_expert,
        experts.layer_bytes,
        options,
    )


def _open_over(name: str, request: DeviceRequest, lent: PagedSlots) -> OpenDevice:
    """Open a device over slots whose memory moves. Raise DeviceError if its slots lie elsewhere."""
    made = KINDS[name].open(request)
    with ExitStack() as undo:
        undo.callback(made.close)
        source = made.make_arena(request.layout.num_bytes).bytes.fill_(_PROBE)
        if not lent.is_reached(lambda slot: made.device.copy(source, slot, None).wait(), source):
            raise DeviceError(
                f"Device {name!r} copied an expert elsewhere than into its slot of the "
                f"{format_size(lent.arena.num_bytes)} of DeviceRequest.arena, where "
                f"{request.num_slots} slots of {format_size(request.layout.num_bytes)} lie one "
                "after another, as their number follows what sequences need. Open the slots with "
                "DeviceRequest.open_slots()."
            )
        undo.pop_all()
    return made


def _open_cuda(
    experts: ExpertFacts,
    num_slots: int,
    kernels: str,
    host_kernels: Kernels,
    executor: HostExecutor,
) -> OpenDevice:
    """Open the GPU; measure its costs once per model and machine. kernels: the option."""
    shape, layout = experts.shape, experts.layout

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
                experts.layer_bytes,
                device=measured,
                make_arena=pinned.make_arena,
                kernels=host_kernels,
            )

    with ExitStack() as undo:
        pinned = undo.enter_context(closing(PinnedMemory()))
        device = undo.enter_context(closing(make_device(num_slots)))
        key = experts.cost_key(this_machine(), host_kernels.name, "cuda", kernels)
        costs = stored_or_measured(key, measure).costs
        close = undo.pop_all().close
    return OpenDevice(device, costs, pinned.make_arena, close, pinned.keep_first)
