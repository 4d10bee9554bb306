"""What a model computes with: threads, kernels, and where its intermediate results go."""

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
    """Handed to models, layers and expert runtimes, which know no more of the machine than this."""

    executor: Executor
    kernels: Kernels
    workspace: Buffers
    device: torch.device = torch.device("cpu")

    def to_device(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Rows in host memory, of one length and type, where this computes; nothing waits."""
        return pinned_copies.to_device(self.device, *rows)
