"""A device: slots beside the host's, filled and computed at once on the calling thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowtide.extend import Costs, Curve, DeviceKind, DeviceRequest, OpenDevice


class Done:
    def is_done(self) -> bool:
        return True

    def wait(self, limit_s: float = 0.0) -> None:
        pass


class SecondHost:
    def __init__(self, request: DeviceRequest) -> None:
        import torch

        self.torch_device = torch.device("cpu")
        self.num_slots, self.kernels = request.num_slots, request.kernels
        self._slots = request.open_slots()

    def describe(self) -> str:
        return "the host once more"

    def copy(self, source: Any, slot: int, after: Any) -> Done:
        if after is not None:
            after.wait()
        self._slots.image(slot).copy_(source)
        return Done()

    def run(self, group: Any, rows: Any, buffers: Any, after: Any) -> Done:
        if after is not None:
            after.wait()
        for slot, first, count in rows.groups(group.experts, group.slots).tolist():
            pairs = slice(first, first + count)
            parts, gate, up = buffers.parts[pairs], buffers.gate[pairs], buffers.up[pairs]
            weights = self._slots.weights(group.layer, slot)
            self.kernels.gated_mlp(parts, weights, gate, up, parts)
        return Done()

    def to_host(self, x: Any, experts: Any) -> tuple[Any, Any]:
        return x, experts

    def host_parts(self, parts: Any) -> Any:
        return parts

    def stage(self, predicted: Any) -> Any:
        return predicted

    def from_host(self, host_parts: Any, rows: Any, experts: Any, parts: Any) -> None:
        pass  # the host has written into `parts` itself

    def host_work(self, num_tokens: Any, work: Any) -> Any:
        return work

    def join(self) -> None:
        pass

    def drain(self) -> None:
        pass

    def close(self) -> None:
        del self._slots


def check(options: Mapping[str, str]) -> None:
    """Takes anything: it does nothing with it."""


def make(request: DeviceRequest) -> OpenDevice:
    device = SecondHost(request)
    expert_s = Curve([(1, 1e-4)])  # on either side, as both are this host
    costs = Costs(request.layout.num_bytes, 1e-5, expert_s, expert_s, expert_s, 0.0)
    return OpenDevice(device, costs, request.make_arena, device.close)


SECOND_HOST = DeviceKind(make, check, is_paced=True)
