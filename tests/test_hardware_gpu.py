"""Costs and rates measured on a GPU."""

from __future__ import annotations

import pytest
import torch

from lowtide.core import MoEShape
from lowtide.devices.cuda import CudaDevice
from lowtide.experts.layout import SlotLayout
from lowtide.hardware.machine import measure_rates, this_machine
from lowtide.hardware.measure import measure_costs
from lowtide.memory.arena import Arena
from lowtide.memory.pinned import PinnedMemory
from lowtide.threads.executor import HostExecutor

pytestmark = pytest.mark.gpu

SHAPE = MoEShape(19, 256, 8, 2048, 512)  # LLaDA2.0-mini


def test_a_gpu_s_costs_are_measured() -> None:
    layout = SlotLayout.of(SHAPE, torch.bfloat16)
    pinned, executor = PinnedMemory(), HostExecutor(SHAPE.num_experts_per_token)
    device = CudaDevice(SHAPE, layout, num_slots=48, max_rows=512, pinned=pinned)

    def make_arena(num_bytes: int) -> Arena:
        arena = Arena(num_bytes)
        pinned.register(arena)
        return arena

    try:
        measurements = measure_costs(
            SHAPE, layout, executor, 27 << 20, device=device, make_arena=make_arena
        )
    finally:
        device.close()
        pinned.close()
        executor.close()
    costs = measurements.costs()
    assert costs.link_s > 0 and costs.sync_s > 0 and costs.disk_read_s == 0
    assert 0 < costs.device_s.at(1) < costs.host_s.at(1)
    assert len(measurements.device) > 1 and len(measurements.dense) > 1


def test_a_gpu_s_rates_are_measured() -> None:
    executor = HostExecutor(8)
    try:
        rates = {rate.name: rate for rate in measure_rates(executor, None)}
    finally:
        executor.close()
    # The ceiling is what the system says of the slot; a virtual machine may say anything.
    link = rates["link, host to GPU, pinned"]
    assert 0 < link.per_s < rates["GPU memory copy, read and written"].per_s
    assert this_machine().gpu == torch.cuda.get_device_name(0)
