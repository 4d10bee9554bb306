"""Memory of one denoising step beside the weights: for a process of its own.

The process loads a cut model, takes steps so that libraries have what they keep, the last one as
long as the one that counts, and notes what it holds. Then its peak starts again (`clear_refs`), one
step is taken, and the peak less the start is the step's.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.masked_shapes import MaskedShape, num_masked
from common.masked_sides import WARM_UP_TOKENS, Side, canvas, open_sides, read_weights
from common.memory import peak_resident_bytes, reset_peak
from common.planned_model import HeadForm, PlannedStep, StepModel
from lowtide.config import ModelConfig
from lowtide.families import read_config_in
from lowtide.hardware.memory import resident_bytes
from lowtide.memory.pass_planner import PassPlan

OURS = "lowtide"


def measure(settings: Mapping[str, Any]) -> dict[str, Any]:
    """One planned step of lowtide's.

    settings: shape, num_layers, num_tokens, prompt_share, form and one of `chunks` (a mapping, or
    "most") and `free_bytes`.
    """
    folder = MaskedShape(**settings["shape"]).folder(settings["num_layers"])
    form = HeadForm(settings.get("form", HeadForm.FUSED.value))
    model = StepModel(folder, form=form)
    plan = plan_of(model, settings)
    with torch.inference_mode(), model.loaded() as engine:
        PlannedStep(engine, plan, form).run()
        start_bytes = restart_peak()
        step = PlannedStep(engine, plan, form)
        step_s = step.seconds()
        step_bytes = peak_resident_bytes() - start_bytes
        return {
            "step_s": step_s,
            "start_bytes": start_bytes,
            "step_bytes": step_bytes,
            "planned_bytes": plan.needed_bytes,
            "arena_bytes": plan.placement.arena_bytes,
            "arena_resident_bytes": resident_within(
                step.memory.bytes.data_ptr(), step.memory.num_bytes
            ),
            "chunks": dict(plan.chunks),
            "binding": plan.binding,
            "num_masked": plan.counts.logit_rows,
        }


def measure_side(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Another side's steps, `steps` by `lengths`, which rise. settings: shape, side, num_layers."""
    folder = MaskedShape(**settings["shape"]).folder(settings["num_layers"])
    with torch.inference_mode():
        config, side = open_warm(folder, settings["side"])
        return {"steps": [_side_step(config, side, length) for length in settings["lengths"]]}


def open_warm(folder: Path, name: str) -> tuple[ModelConfig, Side]:
    """A model's configuration and a side over its weights that has taken its first steps."""
    config = read_config_in(folder)
    [side] = open_sides(config, read_weights(folder), [name]).values()
    for length in WARM_UP_TOKENS:
        side.step(canvas(config, length, length // 2))
    return config, side


def _side_step(config: ModelConfig, side: Side, num_tokens: int) -> dict[str, Any]:
    token_ids = canvas(config, num_tokens, num_tokens // 2)
    before = {f"{name}_before": fact for name, fact in side.facts.items() if name == "num_graphs"}
    side.step(token_ids)  # oneDNN keeps what it compiled for each number of an expert's rows
    start_bytes, start_s = restart_peak(), time.perf_counter()
    side.step(token_ids)
    step_s = time.perf_counter() - start_s
    return {
        "step_s": step_s,
        "start_bytes": start_bytes,
        "step_bytes": peak_resident_bytes() - start_bytes,
        **side.facts,
        **before,
    }


def plan_of(model: StepModel, settings: Mapping[str, Any]) -> PassPlan:
    """The plan that settings ask for."""
    num_tokens = settings["num_tokens"]
    masked = num_masked(num_tokens, settings["prompt_share"])
    if "free_bytes" in settings:
        return model.plan(num_tokens, masked, settings["free_bytes"])
    if settings["chunks"] == "most":
        return model.least_plan(num_tokens, masked)
    return model.plan_of(num_tokens, masked, settings["chunks"])


def resident_within(start: int, num_bytes: int, path: Path = Path("/proc/self/pagemap")) -> int:
    """Return the physical bytes of the pages in a range of addresses.

    Unlike smaps, this leaves out other pages of the same mapping.
    """
    page = mmap.PAGESIZE
    first, stop = start // page, -(-(start + num_bytes) // page)
    with path.open("rb") as file:
        file.seek(8 * first)
        entries = np.frombuffer(file.read(8 * (stop - first)), np.uint64)
    return int(np.count_nonzero(entries >> np.uint64(63))) * page


def restart_peak() -> int:
    """Return the process's resident bytes; its peak starts again from here."""
    gc.collect()
    with suppress(OSError, AttributeError):  # glibc's: what is free in its heap would be used again
        ctypes.CDLL(None).malloc_trim(0)
    reset_peak()
    return resident_bytes()
