"""Several devices as one: their slots one after the other, a link and a compute stream for each.

For devices that share the memory of activations, as emulated ones do. Dense weights, activations
and KV cache are the first one's, and so is the host beside them, of which there is one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate

from torch import Tensor

from lowtide.core import IntArray
from lowtide.experts.device import Device, ExpertGroup
from lowtide.experts.rows import ExpertBuffers, ExpertRows
from lowtide.threads.event import Event
from lowtide.threads.executor import Work


class DeviceGroup:
    """Hands everything to the device whose slot it is about; which slot that is, others decide.

    The methods are those of `Device`.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        """`devices`: at least one, with the shares of `slots_per_device`."""
        self.devices = devices
        self._first = devices[0]
        self.name = self._first.name
        self.torch_device = self._first.torch_device
        self.kernels = self._first.kernels
        *self._starts, self.num_slots = accumulate((d.num_slots for d in devices), initial=0)

    def describe(self) -> str:
        return f"{len(self.devices)} devices, each {self._first.describe()}"

    def copy(self, source: Tensor, slot: int, after: Event | None) -> Event:
        """Begins when the copies queued before it to the same device have ended."""
        owner = self._owner(slot)
        return self.devices[owner].copy(source, slot - self._starts[owner], after)

    def run(
        self, group: ExpertGroup, rows: ExpertRows, buffers: ExpertBuffers, after: Event | None
    ) -> Event:
        owner = self._owner(int(group.slots[0]))
        local = group._replace(slots=group.slots - self._starts[owner])
        return self.devices[owner].run(local, rows, buffers, after)

    def to_host(self, x: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        return self._first.to_host(x, experts)

    def host_parts(self, parts: Tensor) -> Tensor:
        return self._first.host_parts(parts)

    def stage(self, predicted: Tensor) -> Tensor:
        return self._first.stage(predicted)

    def from_host(
        self, host_parts: Tensor, rows: ExpertRows, experts: IntArray, parts: Tensor
    ) -> None:
        self._first.from_host(host_parts, rows, experts, parts)

    def host_work(self, num_tokens: Sequence[int], work: Work) -> Work:
        return self._first.host_work(num_tokens, work)

    def join(self) -> None:
        for device in self.devices:
            device.join()

    def drain(self) -> None:
        for device in self.devices:
            device.drain()

    def close(self) -> None:
        with ExitStack() as stack:  # one that does not end keeps no other from it
            for device in self.devices:
                stack.callback(device.close)

    def _owner(self, slot: int) -> int:
        return bisect_right(self._starts, slot) - 1
