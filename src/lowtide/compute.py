"""What a model computes with: threads, kernels, and where its intermediate results go."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowtide.kernels.reference import Kernels
from lowtide.memory.workspace import Buffers
from lowtide.threads.executor import Executor


@dataclass(frozen=True, slots=True)
class Compute:
    """Handed to models, layers and expert runtimes, which know no more of the machine than this."""

    executor: Executor
    kernels: Kernels
    workspace: Buffers
    device: torch.device = torch.device("cpu")
