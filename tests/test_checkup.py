"""Faults that `lowtide doctor` finds in a machine, and the model that it says runs well there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.cli.doctor import verdict
from lowtide.doctor import checkup
from lowtide.doctor.checkup import SUGGESTED, Present, Suggestion, faults, suggestion
from lowtide.doctor.diagnosis import Diagnosis, Skipped
from lowtide.hardware.machine import PIECES_AT_ONCE, Machine, Rate
from lowtide.kernels.reference import REFERENCE

GIB = 1 << 30


def diagnosis(gpu: str | None = None, disk_bytes_per_s: float = 2e9) -> Diagnosis:
    machine = Machine("a processor", 8, 32 * GIB, "Linux", gpu)
    name = next(iter(PIECES_AT_ONCE))
    rate = Rate(name, "B", disk_bytes_per_s, 0.0, disk_bytes_per_s)
    return Diagnosis(machine, (rate,), (), ())


HEALTHY = Present(None, 30 * GIB, Path("models"), 99 * GIB, None, False, "2.11.0", None)


def test_a_machine_with_nothing_wrong() -> None:
    assert faults(diagnosis(), HEALTHY) == []
    assert next(verdict(diagnosis(), [], None)) == "Nothing is wrong with this machine."


def test_each_fault_comes_with_its_remedy() -> None:
    present = Present(
        "There is no C++ compiler; install one of c++, g++.",
        GIB,
        Path("models"),
        GIB,
        None,
        True,
        "2.8.1+cpu",
        None,
    )
    found = faults(diagnosis(disk_bytes_per_s=1e8), present)
    said = ("install one of c++", "Close other programs", "HF_HOME", "0.10 GB/s", "GPU", "2.9")
    assert len(found) == len(said)
    for fault, words in zip(found, said, strict=True):
        assert words in fault
    [rate] = diagnosis().rates
    restless = Diagnosis(diagnosis().machine, (rate._replace(spread=0.9),), (), ())
    assert "may be faster than these" in faults(restless, present)[-1]
    disturbed = Diagnosis(diagnosis().machine, (rate._replace(ceiling=9 * rate.per_s),), (), ())
    assert "of 1 rates out of 1 half" in faults(disturbed, present)[-1]
    lines = list(verdict(diagnosis(), found, None))
    assert lines[0] == "6 things to fix:" and lines[1] == f"- {found[0]}"
    assert next(verdict(diagnosis(), found[:1], None)) == f"To fix: {found[0]}"


@pytest.mark.parametrize(("cuda", "said"), [(None, "--torch-backend auto"), ("13.0", "CUDA 13.0")])
def test_a_gpu_that_torch_does_not_use(cuda: str | None, said: str) -> None:
    present = HEALTHY._replace(has_nvidia_driver=True, cuda_version=cuda)
    [fault] = faults(diagnosis(), present)
    assert said in fault
    assert faults(diagnosis(gpu="a GPU"), present) == []


def test_a_folder_of_models_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "disk_usage", closed)
    present = HEALTHY._replace(free_disk_bytes=None, no_disk=Present.now().no_disk)
    [fault] = faults(diagnosis(), present)
    assert "Permission denied" in fault and "HF_HOME" in fault


def test_the_state_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a folder that is not made yet, the disk that it will be on counts."""
    folder = tmp_path / "not" / "made" / "yet"
    monkeypatch.setattr(checkup, "cache_folder", lambda: folder)
    present = Present.now()
    assert present.models == folder and present.no_disk is None
    assert present.free_disk_bytes is not None and present.free_disk_bytes > 0
    assert 0 < present.free_memory_bytes and present.torch_version == torch.__version__
    monkeypatch.setattr(checkup, "choose_kernels", lambda *_, **__: REFERENCE)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "install one of" in str(Present.now().no_kernels)


@pytest.mark.parametrize(
    ("free_gib", "hub_id"),
    [(40, SUGGESTED[0][0]), (16, SUGGESTED[1][0]), (12, SUGGESTED[2][0]), (7, SUGGESTED[3][0])],
)
def test_the_largest_model_that_fits_is_suggested(
    free_gib: int, hub_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lowtide.engine.planning import plan as planning

    monkeypatch.setattr(planning, "available_memory_bytes", lambda: free_gib * GIB)
    found = suggestion()
    assert found is not None and found.hub_id == hub_id and found.memory_bytes < free_gib * GIB


def test_a_machine_that_is_too_small_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowtide.engine.planning import plan as planning

    monkeypatch.setattr(planning, "available_memory_bytes", lambda: GIB)
    assert suggestion() is None
    assert "No published model fits" in list(verdict(diagnosis(), [], None))[-1]


def test_what_is_said_of_a_suggestion_and_of_what_was_not_measured() -> None:
    suggested = Suggestion("org/name", "q4", 2 * GIB, 14.0)
    without_disk = Diagnosis(diagnosis().machine, (), (), (Skipped("disk", "it is full"),))
    lines = list(verdict(without_disk, [], suggested))
    assert lines == [
        "disk was not measured: it is full",
        "Runs well here: org/name with --format q4, all of it in memory (2.0 GiB), at most 14 "
        "tokens/s.",
    ]
