"""The GPU benchmark's own logic, on a stand-in for the GPU: what it drives, counts and writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("triton")

import gpu
import torch
from test_cuda_device import StandInCudart, StandInStreams

from lowtide.core import Costs, Curve, MoEShape
from lowtide.devices.cuda import CudaDevice
from lowtide.errors import PlanError
from lowtide.memory.pinned import PinnedMemory
from lowtide.threads.executor import HostExecutor

SHAPE = MoEShape(2, num_experts=16, num_experts_per_token=2, hidden_size=32, expert_size=16)
COSTS = Costs(6144, 1e-4, *[Curve([(1, 1e-4)])] * 3, sync_s=1e-5)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> gpu.Report:
    monkeypatch.setattr(gpu, "MODEL", SHAPE)
    monkeypatch.setattr(gpu, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(gpu, "BUDGETS", (4,))
    stand_in = partial(CudaDevice, streams=StandInStreams(), kernels="reference")
    monkeypatch.setattr(gpu, "CudaDevice", stand_in)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "stand-in")
    monkeypatch.setattr(gpu, "_total_memory_bytes", lambda: 1)
    return gpu.Report("short", tmp_path)


@pytest.mark.parametrize("preset", gpu.PRESETS["full"])
def test_steps_under_every_preset(
    preset: str, report: gpu.Report, capsys: pytest.CaptureFixture[str]
) -> None:
    pinned = PinnedMemory(StandInCudart())
    executor = HostExecutor(SHAPE.num_experts_per_token)
    with torch.inference_mode():
        home = gpu.make_experts(SHAPE, pinned, report)
        bench = gpu.HybridBench(SHAPE, home, pinned, executor, COSTS, 4, preset)
        with bench.running():
            bench.measure(2, (1e9, 1e9), report)
    executor.close()
    report.print_table()
    row = json.loads(report.path.read_text().splitlines()[-1])
    assert row["what"] == "hybrid" and row["preset"] == preset
    assert row["moe_tokens_per_s"] > 0 and row["bound_ms"] > 0 and 0 <= row["hit_rate"] <= 1
    assert f"{preset}, 4 residents" in capsys.readouterr().out


def test_a_resident_layer_runs(report: gpu.Report) -> None:
    pinned = PinnedMemory(StandInCudart())
    home = gpu.make_experts(SHAPE, pinned, report)
    device = CudaDevice(SHAPE, home.slots.layout, 16, 32, pinned, "auto", StandInStreams())
    group = gpu.everyone()
    for expert in group.experts.tolist():
        device.copy(home.slots.image(expert), expert, None)
    layer = gpu.LayerInput(3, 0)
    layer.run(device, group)
    assert layer.out.isfinite().all() and layer.out.any()


def test_a_part_that_fails_leaves_the_others(
    report: gpu.Report, capsys: pytest.CaptureFixture[str]
) -> None:
    with report.part("first"):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    with report.part("second"):
        raise PlanError("24 GiB are needed")
    with report.part("third"):
        report.line("third", "12 GB/s")
    with pytest.raises(gpu.DeadlineReached), report.part("fourth"):
        raise gpu.DeadlineReached
    assert report.num_failed == 1  # a GPU that is too small is no failure
    report.print_table()
    rows = capsys.readouterr().out.splitlines()[-4:-1]
    assert ["failed" in row for row in rows] == [True, False, False]
    assert (
        "illegal memory access" in json.loads(report.path.read_text().splitlines()[-1])["message"]
    )


def test_the_tests_need_pytest_and_say_so(
    report: gpu.Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    assert not gpu.run_tests(report)
    report.print_table()
    assert "no pytest" in capsys.readouterr().out


def test_what_is_compiled_goes_elsewhere_where_the_home_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "no folder"
    home.write_text("")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in gpu._CACHES:
        monkeypatch.setenv(name, "")  # for its return
        monkeypatch.delenv(name)
    gpu.find_caches()
    assert all(Path(os.environ[name]).parent == tmp_path for name in gpu._CACHES)


def test_experts_that_host_memory_has_no_room_for_are_left_out(
    report: gpu.Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layer_bytes = SHAPE.num_experts * 3 * SHAPE.hidden_size * SHAPE.expert_size * 2
    monkeypatch.setattr(gpu, "available_memory_bytes", lambda: 4 * layer_bytes)
    assert gpu.num_layers_with_room("short", report) == 2
    report.print_table()
    assert "2 MoE layers instead of 6" in capsys.readouterr().out
    monkeypatch.setattr(gpu, "available_memory_bytes", lambda: layer_bytes)
    with pytest.raises(SystemExit, match="host memory"):
        gpu.num_layers_with_room("short", report)


def test_benchmarks_run_though_tests_could_not() -> None:
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    done = subprocess.run(
        ["make", "gpu", "PYTHON=false"],
        cwd=gpu.REPOSITORY,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode and "gpu.py test" in done.stdout and "gpu.py short" in done.stdout


def test_results_that_cannot_be_written_are_said_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "stand-in")
    monkeypatch.setattr(gpu, "_total_memory_bytes", lambda: 1)
    monkeypatch.setattr(gpu, "find_caches", lambda: None)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "short", "--out", str(tmp_path / "file" / "out")])
    assert gpu.main() == 1
    assert "OUT=" in capsys.readouterr().err


def test_the_deadline_interrupts() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(gpu.DeadlineReached), gpu.deadline(0.05):
        threading.Event().wait(60)
    signal.signal(signal.SIGALRM, before)


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "short", "--out", str(tmp_path)])
    assert gpu.main() == 1
    assert "no GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())
