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
from cuda_stand_ins import StandInCudart, StandInStreams

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
    monkeypatch.setattr(gpu, "total_memory_bytes", lambda: 1)
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
    for name in gpu.CACHES:
        monkeypatch.setenv(name, "")  # for its return
        monkeypatch.delenv(name)
    gpu.find_caches()
    assert all(Path(os.environ[name]).parent == tmp_path for name in gpu.CACHES)


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
    monkeypatch.setattr(gpu, "total_memory_bytes", lambda: 1)
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


MARKS = """import pytest

ON_GPU = pytest.mark.gpu
BOTH = ['cpu', pytest.param('cuda', marks=ON_GPU)]
"""
MARKED = {
    "marks_of_gpus.py": MARKS,
    "test_direct.py": "import pytest\n\n@pytest.mark.gpu\ndef test_a():\n    pass\n",
    "test_whole.py": "import pytest\n\npytestmark = pytest.mark.gpu\n\ndef test_b():\n    pass\n",
    "test_by_name.py": "from marks_of_gpus import ON_GPU\n\n@ON_GPU\ndef test_c():\n    pass\n",
    "test_params.py": (
        "import pytest\nfrom marks_of_gpus import BOTH\n\n"
        "@pytest.mark.parametrize('device', BOTH)\ndef test_d(device):\n    pass\n"
    ),
    "test_engine_class.py": (
        "from marks_of_gpus import ON_GPU\n\n@ON_GPU\nclass TestE:\n    def test_e(self):\n"
        "        pass\n\n    def test_f(self):\n        pass\n"
    ),
    "test_other.py": "def test_g():\n    assert False\n",
    "test_absent.py": "import no_such_module\n\ndef test_h():\n    pass\n",
}
RUN = """
import json, sys
from pathlib import Path
sys.path[:0] = [{folder!r}, {benchmarks!r}]
import gpu, torch
torch.cuda.is_available = lambda: True
torch.cuda.get_device_name = lambda: "stand-in"
gpu.total_memory_bytes = lambda: 1
gpu.find_caches = lambda: None
tests = gpu.run_tests
gpu.run_tests = lambda report: tests(report, Path({folder!r}))
sys.argv = ["gpu.py", "test", "--out", {out!r}, "--deadline", {deadline!r}]
sys.exit(gpu.main())
"""


def run_marked(folder: Path, deadline: str) -> tuple[int, list[dict[str, object]], str]:
    """The exit code, lines and table of the stage of tests over a folder with these files."""
    benchmarks = str(gpu.REPOSITORY / "benchmarks")
    code = RUN.format(
        folder=str(folder), benchmarks=benchmarks, out=str(folder / "out"), deadline=deadline
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    [path] = (folder / "out").glob("*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return done.returncode, lines, done.stdout


@pytest.fixture
def marked(tmp_path: Path) -> Path:
    for name, text in MARKED.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    return tmp_path


def test_all_tests_that_pytest_finds_by_the_mark_are_run(marked: Path) -> None:
    """However the mark came there; in the repository most come by a name of another file."""
    asked = ["-m", "pytest", "-m", "gpu", "--collect-only", "-q", "--continue-on-collection-errors"]
    found = subprocess.run(
        [sys.executable, *asked, "."], cwd=marked, capture_output=True, text=True, check=False
    )
    by_mark = {line for line in found.stdout.splitlines() if "::" in line and " " not in line}
    assert len(by_mark) == 6
    code, lines, table = run_marked(marked, "100")
    assert code == 0, table
    assert {line["test"] for line in lines} == by_mark
    assert {line["outcome"] for line in lines} == {"passed"}
    assert list(lines)[-1]["test"] in {each for each in by_mark if "engine" in each}
    assert "test_absent.py" in table and "has no no_such_module" in table


def test_a_run_that_reaches_its_deadline_is_green_and_lists_what_was_left(marked: Path) -> None:
    slow = "import time\n\nimport pytest\n\npytestmark = pytest.mark.gpu\n"
    slow += "".join(f"\ndef test_{i}():\n    time.sleep(1000)\n" for i in range(3))
    (marked / "test_very.py").write_text(slow)
    code, lines, table = run_marked(marked, "12")
    left = {line["part"] for line in lines if line["what"] == "not reached"}
    assert {f"test_very.py::test_{i}" for i in range(3)} <= left
    assert code == 0, table
    assert "test_very.py" in table and "3 not reached" in table
    failing = (marked / "test_direct.py").read_text().replace("pass", "assert False")
    (marked / "test_direct.py").write_text(failing)
    for path in (marked / "out").iterdir():
        path.unlink()
    assert run_marked(marked, "12")[0] == 1
