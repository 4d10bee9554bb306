"""The running machine as a hardware profile, which `lowtide simulate --machine` takes.

Rates are those of a model's experts, so nothing is taken off them as efficiency.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO

import torch

from lowtide.doctor.diagnosis import Diagnosis, ExpertCosts
from lowtide.engine.opening.device_choice import resolve_device
from lowtide.errors import StorageError, UsageError
from lowtide.files.whole_file import check_writable, whole_file
from lowtide.hardware.measure import Point

_FIRST_WORDS = "# Measured by lowtide"


def check_profile(path: Path, device: str) -> None:
    """Refuse before anything is measured: raises UsageError without a device, StorageError."""
    check_writable(path, "profile", _is_profile)
    if resolve_device(device) == "cpu":
        raise UsageError(
            "A profile is of a host and a device beside it, and there is no GPU; add --device "
            "emulated, or run bench where there is one."
        )


def save_profile(diagnosis: Diagnosis, path: Path) -> None:
    """Write the profile to `path`. Raise StorageError."""
    text = profile_text(diagnosis)
    with whole_file(path, "profile", _is_profile) as file:
        file.write(text.encode())


def _is_profile(file: IO[bytes]) -> bool:
    return file.readline(80).startswith(_FIRST_WORDS.encode())


def profile_text(diagnosis: Diagnosis) -> str:
    """Return the profile in TOML, from the first model's experts.

    The more they resemble the experts to be replayed, the better. An expert with one token shows
    the speed of reading weights, one with most tokens the speed of computing. Raises StorageError
    if no experts or no device were measured.
    """
    if not diagnosis.costs:
        raise StorageError(
            "A profile is made of a model's experts, and this model has none; give one that has."
        )
    costs = diagnosis.costs[0]
    measured = costs.stored.measurements
    if measured.link is None or measured.sync is None:
        raise StorageError(
            "No device was measured, and a profile needs one; add --device emulated, or run bench "
            "where there is a GPU."
        )
    machine = diagnosis.machine
    device_bytes = machine.memory_bytes
    if machine.gpu is not None and costs.device.startswith("cuda"):
        device_bytes = torch.cuda.get_device_properties(0).total_memory
    sections = {
        "device": _engine(costs, measured.device, device_bytes),
        # One copy of an expert, its start included.
        "link": {
            "bandwidth_GBps": measured.expert_bytes / measured.link.median_s / 1e9,
            "latency_us": 1e-3,
        },
        "host": _engine(costs, measured.host, machine.memory_bytes),
        "sync": {"latency_us": max(1e-3, measured.sync.median_s * 1e6)},
        "efficiency": dict.fromkeys(("device", "link", "host"), 1.0),
    }
    lines = [f"{_FIRST_WORDS} bench: experts of {costs.name}, {costs.stored.date[:10]}."]
    lines.append(f"name = {_quoted(f'{machine.cpu}, {costs.device}')}")
    for section, values in sections.items():
        lines += ["", f"[{section}]", *(f"{name} = {value:.6g}" for name, value in values.items())]
    return "\n".join(lines) + "\n"


def _engine(costs: ExpertCosts, curve: tuple[Point, ...], memory_bytes: int) -> dict[str, float]:
    first, last = curve[0], curve[-1]
    # A multiplication and an addition for each of an expert's weights and tokens.
    operations = 2 * 3 * costs.shape.hidden_size * costs.shape.expert_size * last.num_tokens
    return {
        "memory_GB": memory_bytes / 1e9,
        "bandwidth_GBps": costs.stored.measurements.expert_bytes / first.timing.median_s / 1e9,
        "compute_TFLOPs": operations / last.timing.median_s / 1e12,
    }


def _quoted(text: str) -> str:
    """Return a TOML string of one line."""
    return '"' + text.replace("\\", "/").replace('"', "'") + '"'
