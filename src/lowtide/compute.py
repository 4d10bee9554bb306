"""Resources that a model computes with: threads, kernels, workspace and device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.kernels.reference import Kernels
from lowtide.memory import pinned_copies
from lowtide.memory.workspace import Buffers
from lowtide.threads.executor import Executor


@dataclass(frozen=True, slots=True)
class Compute:
    """Resources of models, layers and expert runtimes: all they know of the machine."""

    executor: Executor
    kernels: Kernels
    workspace: Buffers
    device: torch.device = torch.device("cpu")

    def to_device(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Copy rows in host memory, of one length and type, to the device without waiting."""
        return pinned_copies.to_device(self.device, *rows)
