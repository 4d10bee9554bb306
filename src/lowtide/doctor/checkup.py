"""Finds faults of this machine with their remedies, and a published model that runs well on it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from lowtide.config import format_size
from lowtide.doctor.diagnosis import Diagnosis
from lowtide.errors import HubError, PlanError, StorageError, UnsupportedError
from lowtide.families import families
from lowtide.hardware.machine import DISTURBED, Rate, disk_rate
from lowtide.hardware.memory import available_memory_bytes
from lowtide.kernels.choice import choose_kernels
from lowtide.kernels.cpu.compiler import find_compiler
from lowtide.kernels.reference import REFERENCE
from lowtide.llm import plan_model
from lowtide.model_folder.hub_cache import cache_folder
from lowtide.plan import OWN_FORMAT, MemoryPlan

LEAST_MEMORY_BYTES = 3 << 30
LEAST_DISK_BYTES = 5 << 30
"""Free memory and disk space that a small model in 4 bits needs."""

SLOW_DISK_BYTES_PER_S = 5e8
"""Below this, as for hard disks and network folders, reads determine every speed."""

BUSY_SPREAD = 0.5
"""If repeats of most rates spread further than this share, other programs were running."""

OLDEST_TORCH = (2, 9)
CONTEXT_TOKENS = 4096

SUGGESTED = (
    ("Qwen/Qwen3-30B-A3B", "q4"),
    ("openai/gpt-oss-20b", OWN_FORMAT),
    ("inclusionAI/Ling-mini-2.0", "q4"),
    ("allenai/OLMoE-1B-7B-0924-Instruct", "q4"),
)
"""Hub ids and formats, largest first; the first that fits into memory is suggested."""

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


class Present(NamedTuple):
    """State of this machine now, beside what was measured."""

    no_kernels: str | None  # why there are no compiled kernels; None: there are
    free_memory_bytes: int
    models: Path | None  # folder that models are kept in
    free_disk_bytes: int | None
    no_disk: str | None  # why that folder or its free space is not known, and a way out
    has_nvidia_driver: bool
    torch_version: str
    cuda_version: str | None  # that torch was built for

    @classmethod
    def now(cls) -> Present:
        folder, free_bytes, no_disk = _models_folder()
        return cls(
            _without_compiler(),
            available_memory_bytes(),
            folder,
            free_bytes,
            no_disk,
            _NVIDIA_DRIVER.exists(),
            torch.__version__,
            torch.version.cuda,
        )


class Suggestion(NamedTuple):
    """A published model that fits into free memory; at_most: tokens/s that the processor allows."""

    hub_id: str
    format: str
    memory_bytes: int
    at_most: float | None


def faults(diagnosis: Diagnosis, present: Present) -> list[str]:
    """Return the machine's faults, each with its remedy; empty if there are none."""
    found = (
        _slow_kernels(present.no_kernels),
        _little_memory(present.free_memory_bytes, diagnosis.machine.memory_bytes),
        _little_disk(present),
        _slow_disk(diagnosis.rates),
        None if diagnosis.machine.gpu else _unused_gpu(present),
        _old_torch(present.torch_version),
        _busy(diagnosis.rates),
    )
    return [fault for fault in found if fault is not None]


def suggestion() -> Suggestion | None:
    """Return a model that fits into free memory; None if not even the smallest does."""
    sizes = {size.hub_id: size for each in families().values() for size in each.sizes().values()}
    for hub_id, format in SUGGESTED:
        plan = _planned(sizes[hub_id].config, format)
        if plan is not None and plan.budget_bytes >= plan.full_bytes:
            at_most = None if plan.prediction is None else plan.prediction.at_most
            return Suggestion(hub_id, format, plan.full_bytes, at_most)
    return None


def _planned(config: Mapping[str, Any], format: str) -> MemoryPlan | None:
    """Plan for all free memory here; None if that is too little.

    Raises StorageError if there is no folder for temporary files.
    """
    try:
        with tempfile.TemporaryDirectory() as name:
            (Path(name) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            return plan_model(name, device="cpu", format=format, context=CONTEXT_TOKENS)
    except PlanError:
        return None
    except OSError as error:
        raise StorageError(
            f"No temporary file can be written ({error.strerror}): TMPDIR names a folder for them."
        ) from error


def _without_compiler() -> str | None:
    """Say why there are no compiled kernels; None if there are."""
    if choose_kernels("auto", torch.bfloat16) is not REFERENCE:
        return None
    try:
        find_compiler()
    except UnsupportedError as error:
        return str(error)
    return "The notice above says why there are none."


def _models_folder() -> tuple[Path | None, int | None, str | None]:
    """Return the folder of models and its free bytes, or why they are not known."""
    try:
        folder = cache_folder()
    except HubError as error:
        return None, None, str(error)
    try:
        present = next((each for each in (folder, *folder.parents) if each.exists()), folder)
        return folder, shutil.disk_usage(present).free, None
    except OSError as error:
        reason = error.strerror or error
        told = f"{folder}, where models are kept, cannot be used: {reason}. Set HF_HOME."
        return folder, None, told


def _slow_kernels(reason: str | None) -> str | None:
    if reason is None:
        return None
    return f"Models run several times slower than they could, without compiled kernels. {reason}"


def _little_memory(free_bytes: int, total_bytes: int) -> str | None:
    if free_bytes >= LEAST_MEMORY_BYTES:
        return None
    return (
        f"Only {format_size(free_bytes)} of {format_size(total_bytes)} of memory are free; a small "
        f"model needs {format_size(LEAST_MEMORY_BYTES)}. Close other programs."
    )


def _little_disk(present: Present) -> str | None:
    free_bytes = present.free_disk_bytes
    if free_bytes is None or free_bytes >= LEAST_DISK_BYTES:
        return present.no_disk
    return (
        f"Only {format_size(free_bytes)} are free for models in {present.models}; a small one in 4 "
        f"bits takes {format_size(LEAST_DISK_BYTES)}. Make room, or set HF_HOME to a folder on a "
        "larger disk."
    )


def _slow_disk(rates: Sequence[Rate]) -> str | None:
    per_s = disk_rate(rates)
    if per_s is None or per_s >= SLOW_DISK_BYTES_PER_S:
        return None
    return (
        f"The disk reads {per_s / 1e9:.2f} GB/s: a model larger than memory will be slow. Keep "
        "models on an SSD of this machine (HF_HOME names the folder)."
    )


def _unused_gpu(present: Present) -> str | None:
    if not present.has_nvidia_driver:
        return None
    if present.cuda_version is None:
        return (
            "There is an NVIDIA GPU, and the installed torch cannot use any. Install the build for "
            "it: uv pip install --reinstall --torch-backend auto torch."
        )
    return (
        "There is an NVIDIA GPU that torch cannot use. Its driver may be too old for CUDA "
        f"{present.cuda_version}; nvidia-smi shows which it has."
    )


def _old_torch(version: str) -> str | None:
    if tuple(map(int, version.split(".")[:2])) >= OLDEST_TORCH:
        return None
    oldest = ".".join(map(str, OLDEST_TORCH))
    return f"torch {version} is too old. Install {oldest} or newer."


def _busy(rates: Sequence[Rate]) -> str | None:
    """Return a fault if rates were discarded, or repeats spread far apart."""
    again = "Run lowtide doctor again when it is quiet."
    num_disturbed = sum(rate.is_disturbed for rate in rates)
    if num_disturbed:
        return (
            f"Other programs used this machine while it was measured: of {num_disturbed} rates out "
            f"of {len(rates)} half of the repeats took more than {DISTURBED:g} times as long as "
            f"the best one, so these are not kept. {again}"
        )
    if not rates or median(rate.spread for rate in rates) <= BUSY_SPREAD:
        return None
    return (
        "Other programs used this machine while it was measured, so it may be faster than these "
        f"rates. {again}"
    )
