"""Interface between the expert runtime and a compute device with memory of its own.

A device has two streams of work, each in its own order: copies into slots, and experts computed
from slots. Streams wait for each other's events; the calling thread only queues work and never
waits. A device decides nothing.
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
    """Experts that are computed together, and their slots on one device."""

    layer: int
    experts: IntArray  # ascending ids
    slots: IntArray


class Device(Protocol):
    """Fast tier: expert slots, a copy stream into them, a compute stream over them."""

    torch_device: torch.device  # of dense weights, activations and KV cache
    num_slots: int
    kernels: Kernels  # for what is computed there besides experts

    def describe(self) -> str:
        """Describe the device in one line."""
        ...

    def copy(self, source: Tensor, slot: int, after: Event | None) -> Event:
        """Queue one contiguous copy of an expert's slot image into `slot`.

        source [slot_bytes] uint8, in host memory, unchanged until the event. The copy starts when
        all copies queued before it have ended and `after` (the slot's last use) is done.
        """
        ...

    def run(
        self, group: ExpertGroup, rows: ExpertRows, buffers: ExpertBuffers, after: Event | None
    ) -> Event:
        """Queue the gated MLPs of `group`: `buffers.parts` from inputs to outputs, in place.

        They start when `after` is done and what the caller queued before on this device has ended.
        """
        ...

    def to_host(self, x: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        """Copy x [tokens, hidden] and experts [tokens, k] int64 to host memory.

        Waits for the device: the layer's one synchronisation. Emulated devices return their
        arguments. Valid until the next call.
        """
        ...

    def host_parts(self, parts: Tensor) -> Tensor:
        """Return host memory for the host's share of `parts` [tokens * k, hidden].

        Emulated devices return `parts` itself, which holds the inputs; others a buffer that is to
        be filled with those of the host's experts. Valid until the next layer.
        """
        ...

    def stage(self, predicted: Tensor) -> Tensor:
        """Queue the copy of tokens per expert [num_experts] int64 into host memory.

        The result is valid from the next `to_host` to the next `stage`, without another
        synchronisation.
        """
        ...

    def from_host(
        self, host_parts: Tensor, rows: ExpertRows, experts: IntArray, parts: Tensor
    ) -> None:
        """Queue the copy of the host experts' outputs into their rows of `parts`."""
        ...

    def host_work(self, num_tokens: Sequence[int], work: Work) -> Work:
        """Return the host's work on experts, possibly stretched in time.

        num_tokens: of each expert that `work` computes.
        """
        ...

    def join(self) -> None:
        """Make the outputs of all queued `run`s visible to the calling thread's next work."""
        ...

    def drain(self) -> None:
        """Wait until both streams have ended everything, failed or not."""
        ...

    def close(self) -> None:
        """Stop the device's threads and free its memory."""
        ...
