"""Live memory during one denoising step, moment by moment: for a process of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.allocation_trace import Moment, trace, use_of
from common.cuda_allocator import replay
from common.masked_memory import OURS, open_warm, plan_of, restart_peak
from common.masked_shapes import MaskedShape
from common.masked_sides import canvas
from common.memory import peak_resident_bytes
from common.planned_model import PlannedStep, StepModel
from lowtide.memory.workspace import State, Workspace

NUM_STEPS = 3
"""Replays of a step's trace: memory that an allocator keeps from one to the next counts."""


class TimedWorkspace(Workspace):
    """Notes how many bytes are alive, whenever that changes."""

    def __init__(self, moments: list[Moment], buffer: Tensor) -> None:
        """moments: where it notes them."""
        self._moments = moments
        super().__init__(buffer)

    @property
    def state(self) -> State:
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state
        live_bytes = sum(one.place.num_bytes for one in state.alive)
        self._moments.append(Moment(time.perf_counter(), live_bytes))


def measure(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Measure a step's peak of memory and its average over the step's time.

    settings: as of `masked_memory.measure`, and the side. Sides with torch's allocator also have
    the bytes that CUDA's would reserve.
    """
    shape = MaskedShape(**settings["shape"])
    folder = shape.folder(settings["num_layers"])
    with torch.inference_mode():
        if settings["side"] == OURS:
            return _trace_ours(folder, settings)
        return _trace_side(folder, settings)


def _trace_side(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Beside what its allocations say, what the process held more during the step."""
    config, side = open_warm(folder, settings["side"])
    num_tokens = settings["num_tokens"]
    token_ids = canvas(config, num_tokens, num_tokens // 2)
    side.step(token_ids)  # oneDNN keeps what it compiled for each number of an expert's rows
    start_bytes = restart_peak()
    traced = trace(lambda: side.step(token_ids))
    resident_bytes = peak_resident_bytes() - start_bytes
    peaks = replay(traced.changes * NUM_STEPS)
    return {
        **use_of(traced.moments)._asdict(),
        "num_changes": len(traced.changes),
        **peaks._asdict(),
        "inflation": peaks.inflation,
        "resident_bytes": resident_bytes,
        **side.facts,
    }


def _trace_ours(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Trace lowtide's workspace and the memory that libraries allocate besides.

    The two peaks are added up, even where they are at different times.
    """
    model = StepModel(folder)
    plan = plan_of(model, settings)
    with model.loaded() as engine:
        PlannedStep(engine, plan, model.form).run()  # the second step counts, as of other sides
        moments: list[Moment] = []
        step = PlannedStep(engine, plan, model.form, partial(TimedWorkspace, moments))
        moments[:] = [Moment(time.perf_counter(), 0)]
        traced = trace(step.run)
        moments.append(Moment(time.perf_counter(), 0))
    planned, library = use_of(moments), use_of(traced.moments)
    return {
        "peak_bytes": planned.peak_bytes + library.peak_bytes,
        "byte_seconds": (planned.average_bytes + library.average_bytes) * library.seconds,
        "seconds": library.seconds,
        "library_peak_bytes": library.peak_bytes,
        "chunks": dict(plan.chunks),
    }
