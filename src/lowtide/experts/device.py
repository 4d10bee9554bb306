"""A compute device with memory of its own, as the expert runtime sees it.

Two streams of work, each in its own order: copies into slots, and experts computed from slots.
Streams wait for each other's events, never for the calling thread, which only queues. `cuda.py`
and `emulated.py` are the two kinds. A device decides
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lowtide.core import IntArray
from lowtide.experts.rows import ExpertBuffers, ExpertRows
from lowtide.kernels.reference import Kernels
from lowtide.threads.event import Event
from lowtide.threads.executor import Work


class ExpertGroup(NamedTuple):
    """Experts that are computed in one go, and the slots of one device that hold their weights."""

    layer: int
    experts: IntArray  # ascending ids
    slots: IntArray


class Device(Protocol):
    """The fast tier: expert slots, a copy stream into them, a compute stream over them."""

    torch_device: torch.device  # of dense weights, activations and KV cache
    num_slots: int
    kernels: Kernels  # of what is computed there beside experts

    def describe(self) -> str:
        """One line on what it is, for people."""
        ...

    def copy(self, source: Tensor, slot: int, after: Event | None) -> Event:
        """Queues one contiguous copy of an expert's slot image into `slot`.

        source [slot_bytes] uint8, in host memory, unchanged until the event. The copy starts
        when all copies queued before it have ended and `after` (the slot's last use) is done.
        """
        ...

    def run(
        self, group: ExpertGroup, rows: ExpertRows, buffers: ExpertBuffers, after: Event | None
    ) -> Event:
        """Queues the gated MLPs of `group` over their pairs: `buffers.parts` from inputs to
        outputs, in place.

        Starts when `after` is done and what the caller queued before on this device has ended.
        """
        ...

    def to_host(self, x: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        """X [tokens, hidden] and experts [tokens, k] int64 in host memory.

        Waits for the device: the layer's one synchronisation. Emulated devices hand out what they
        are given. Valid until the next call.
        """
        ...

    def host_parts(self, parts: Tensor) -> Tensor:
        """Where the host computes its share of `parts` [tokens * k, hidden], in host memory.

        Emulated devices hand out `parts` itself, which hold the inputs; others a buffer that is to
        be filled with those of the host's experts. Valid until the next layer.
        """
        ...

    def stage(self, predicted: Tensor) -> Tensor:
        """Queues the copy of tokens per expert [num_experts] int64 into host memory.

        The answer is valid from the next `to_host` to the next `stage`: no synchronisation more.
        """
        ...

    def from_host(
        self, host_parts: Tensor, rows: ExpertRows, experts: IntArray, parts: Tensor
    ) -> None:
        """Queues the copy of the host experts' outputs into `parts`, where they belong."""
        ...

    def host_work(self, num_tokens: Sequence[int], work: Work) -> Work:
        """What computing experts on the host becomes here: itself, or stretched in time.

        num_tokens: of each expert that `work` computes.
        """
        ...

    def join(self) -> None:
        """What the calling thread does next sees the outputs of all that was queued by `run`."""
        ...

    def drain(self) -> None:
        """Waits until both streams have ended everything, failed or not."""
        ...

    def close(self) -> None:
        """Ends the device's threads and gives back its memory."""
        ...
