"""Resources that a model computes with: threads, kernels, workspace and device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from lowtide.kernels.reference import Kernels
from lowtide.memory import pinned_copies
from lowtide.memory.cuda_graphs import Gap, Recorder
from lowtide.memory.workspace import Buffers, State
from lowtide.threads.executor import Executor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Compute:
    """Resources of models, layers and expert runtimes: all they know of the machine."""

    executor: Executor
    kernels: Kernels
    workspace: Buffers
    device: torch.device = torch.device("cpu")
    recorder: Recorder | None = None  # of a GPU whose passes can be captured

    def between_graphs(self, part: Callable[[T], None], given: T) -> None:
        """Run a part of a pass that depends on its sequences, which no CUDA graph may contain.

        `part` may be run again, given the same of another pass. It reads and writes memory of the
        workspace and of sequences, and hands over no tensor.
        """
        if self.recorder is None or not self.recorder.is_capturing:
            part(given)
        else:
            self.recorder.cut(partial(self._resume, part, self.workspace.state), given)

    def _resume(self, part: Gap, state: State, given: object) -> None:
        self.workspace.state = state
        part(given)

    def to_device(self, *rows: Tensor, there: Tensor | None = None) -> tuple[Tensor, ...]:
        """Copy rows in host memory, of one length and type, to the device without waiting.

        there: [rows, length], where they go; by default new memory.
        """
        return pinned_copies.to_device(self.device, *rows, there=there)
