"""Passes of few rows beside a GPU, captured once and queued again in few calls.

Queueing a layer takes the host longer than a GPU takes to run it for one token. While every expert
stays where it is on the GPU, a pass differs from an earlier one of as many rows by its token ids,
its positions and its sequences alone. So it is captured (`memory/cuda_graphs.py`), and for the next
ones the host queues a copy of ids and positions, graphs, and what lies between them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.compute import Compute
from lowtide.core import StepKind
from lowtide.errors import DeviceError, InternalError
from lowtide.layers.batch import Batch
from lowtide.layers.moe import ModelExperts
from lowtide.memory.cuda_graphs import Piece, queue_again
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
    """A pass that has run, and its graphs once it was captured."""

    setting: _Setting
    inputs: Tensor | None = None  # [2, rows]: token ids and positions
    pieces: Sequence[Piece] = ()


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

    def run(self, batch: Batch, queue: Callable[[Tensor, Tensor], None]) -> None:
        """Queue a pass, by its graphs if it has any.

        queue: queues the layers over token ids and positions [rows] int64 on the GPU. A pass is
        captured when it comes a second time: the first compiles kernels, and tells the GPU where
        experts are.
        """
        version = self._experts.settle_whole()
        setting = None if version is None else self._setting(version, batch)
        known = None if setting is None else self._passes.get(len(batch.token_ids))
        if known is None or known.setting != setting:
            queue(*self._compute.to_device(batch.token_ids, batch.positions))
            if setting is not None:
                self._keep(_Pass(setting), batch)
        elif known.inputs is not None:
            self._repeat(known, batch)
            self._keep(known, batch)
        else:
            self._capture(known, batch, queue)

    def _setting(self, version: int, batch: Batch) -> _Setting | None:
        """Return the setting of a pass whose buffers are taken; None if it is not captured.

        Those are passes over prompts, whose numbers of rows rarely come again, and over several
        parts of a sequence, whose states could not be turned back if CUDA refused.
        """
        num_sequences = len({id(segment.kv) for segment in batch.segments})
        if self._is_refused or len(batch.token_ids) > MAX_ROWS:
            return None
        if batch.step.kind is StepKind.PREFILL or num_sequences < len(batch.segments):
            return None
        places = tuple([one.place for one in self._workspace.state.alive])
        return _Setting(version, self._workspace.plan, places)

    def _keep(self, latest: _Pass, batch: Batch) -> None:
        num_rows = len(batch.token_ids)
        self._passes.pop(num_rows, None)
        self._passes[num_rows] = latest
        if len(self._passes) > MAX_KEPT:
            del self._passes[next(iter(self._passes))]

    def _repeat(self, known: _Pass, batch: Batch) -> None:
        self._compute.to_device(batch.token_ids, batch.positions, there=known.inputs)
        try:
            queue_again(known.pieces, batch.segments)
        finally:
            self._experts.end_repeated(len(batch.token_ids), self._recorder.end_of_queue())

    def _capture(self, known: _Pass, batch: Batch, queue: Callable[[Tensor, Tensor], None]) -> None:
        """Queue a pass and capture it; if CUDA refuses, warn, and queue all passes anew."""
        before, num_rows = self._workspace.state, len(batch.token_ids)
        inputs = torch.empty((2, num_rows), dtype=torch.int64, device=self._compute.device)
        self._compute.to_device(batch.token_ids, batch.positions, there=inputs)
        self._experts.add_counts()  # of earlier passes
        try:
            with self._recorder.capture() as pieces:
                queue(*inputs.unbind())
                self._experts.add_counts()
        except (RuntimeError, DeviceError) as error:
            self._is_refused = True
            self._passes.clear()
            self._recorder.end_of_queue().wait()  # for what came before the refusal
            warnings.warn(
                f"The GPU's work is queued anew in each pass: CUDA does not capture it ({error}).",
                stacklevel=2,
            )
        else:
            self._keep(_Pass(known.setting, inputs, pieces), batch)
        finally:
            self._experts.end_capture(self._recorder.end_of_queue())
        if self._is_refused:
            self._workspace.state = before
            queue(*inputs.unbind())
