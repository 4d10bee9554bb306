"""Passes of few rows beside a GPU, captured once and queued again in few calls.

Queueing a layer takes the host longer than a GPU takes to run it for one token. While every expert
stays where it is on the GPU, a pass differs from an earlier one of as many rows by its token ids,
its positions and its sequences alone. So it is captured (`memory/cuda_graphs.py`), and for the next
ones the host queues a copy of ids and positions, graphs, and what layers keep apart.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.compute import Compute
from lowtide.errors import DeviceError, InternalError
from lowtide.layers.batch import Batch
from lowtide.layers.moe import ModelExperts
from lowtide.memory.cuda_graphs import Step, queue_again
from lowtide.memory.planner import ArenaPlaces, Place
from lowtide.memory.workspace import Workspace

MAX_ROWS = 64
"""Most rows of a pass that is captured: with more of them a GPU is busier than the host."""

MAX_KEPT = 8
"""Numbers of rows whose latest pass is kept: each graph takes some of the GPU's memory.

They and what torch allocates in them are in the tenth of a GPU's free memory that a plan leaves to
libraries.
"""


class _Setting(NamedTuple):
    """What the memory that a pass uses depends on, beside its number of rows."""

    experts: int  # changes with the place of any expert
    plan: ArenaPlaces  # of the workspace
    places: tuple[Place, ...]  # of what is alive when its layers begin


class _Pass(NamedTuple):
    """A pass that was queued, and its graphs once it was captured."""

    setting: _Setting
    inputs: Tensor  # [2, rows]: token ids and positions
    steps: tuple[Step, ...] = ()


class CapturedPasses:
    """Captured passes of a model, by their number of rows."""

    def __init__(self, compute: Compute, experts: ModelExperts) -> None:
        """compute: of a GPU, with a recorder and a planned workspace."""
        if compute.recorder is None or not isinstance(compute.workspace, Workspace):
            raise InternalError("Passes are captured on a GPU, in a workspace that has a plan.")
        self._compute, self._experts = compute, experts
        self._recorder, self._workspace = compute.recorder, compute.workspace
        self._passes: dict[int, _Pass] = {}  # the latest last
        self._is_refused = False

    def run(self, batch: Batch, queue: Callable[[Tensor, Tensor], None]) -> bool:
        """Queue a pass by its graphs; return False if it is to be queued without.

        queue: queues the layers over token ids and positions [rows] int64 on the GPU. A pass is
        captured when it comes a second time: the first compiles kernels, and tells the GPU where
        experts are.
        """
        num_rows, version = len(batch.token_ids), self._experts.whole_version()
        if version is None or num_rows > MAX_ROWS or self._is_refused:
            return False
        places = tuple([one.place for one in self._workspace.state.alive])
        setting = _Setting(version, self._workspace.plan, places)
        known = self._passes.pop(num_rows, None)
        if known is None or known.setting != setting:
            inputs = torch.empty((2, num_rows), dtype=torch.int64, device=self._compute.device)
            self._keep(num_rows, _Pass(setting, inputs))
            return False
        self._compute.to_device(batch.token_ids, batch.positions, there=known.inputs)
        if known.steps:
            queue_again(known.steps, batch.segments)
            self._experts.count_whole_pass(num_rows)
            self._experts.note_whole_pass(self._recorder.end_of_queue())
        else:
            known = known._replace(steps=self._capture(partial(queue, *known.inputs.unbind())))
        self._keep(num_rows, known)
        return not self._is_refused

    def _keep(self, num_rows: int, latest: _Pass) -> None:
        self._passes[num_rows] = latest
        if len(self._passes) > MAX_KEPT:
            del self._passes[next(iter(self._passes))]

    def _capture(self, queue: Callable[[], None]) -> tuple[Step, ...]:
        """Queue a pass and capture it; warn, and capture no other, if CUDA refuses."""
        before = self._workspace.state
        self._experts.add_counts()  # of earlier passes
        try:
            with self._recorder.capture() as steps:
                queue()
                self._experts.add_counts()
        except (RuntimeError, DeviceError) as error:
            self._is_refused = True
            self._passes.clear()
            warnings.warn(
                f"The GPU's work is queued anew in each pass: CUDA does not capture it ({error}).",
                stacklevel=2,
            )
            self._recorder.end_of_queue().wait()  # for what came before the refusal
            self._workspace.state = before
            steps = []
        finally:
            self._experts.end_capture(self._recorder.end_of_queue())
        return tuple(steps)
