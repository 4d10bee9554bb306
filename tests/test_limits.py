"""Refusals of a system (memory, files, /proc, an output) end in one line with a way out."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from lowtide.errors import PlanError, UsageError
from lowtide.hardware import memory

DEMO = "demo:autoregressive"


def run(*arguments: str, prepare: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, behind what a shell does first."""
    command = f'{prepare} exec "$@"'
    program = [sys.executable, "-m", "lowtide", *arguments]
    return subprocess.run(
        ["bash", "-c", command, "bash", *program], capture_output=True, text=True, check=False
    )


def check_is_one_line(done: subprocess.CompletedProcess[str], *said: str) -> None:
    assert done.returncode in (1, 2), done
    assert "Traceback" not in done.stderr, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("lowtide: ") and all(each in last for each in said), done.stderr


@pytest.mark.parametrize("kib", [60_000, 150_000, 300_000, 600_000, 900_000])
def test_little_address_space(kib: int) -> None:
    done = run("generate", DEMO, "1+1", prepare=f"ulimit -v {kib};")
    if "Original error" in done.stderr:  # numpy prints before it raises
        assert "ulimit -v" in done.stderr and done.returncode in (1, 2)
        return
    check_is_one_line(done, "imit")


@pytest.mark.parametrize("more", [0, 1, 2, 4])
def test_few_files(more: int) -> None:
    """Where Python itself cannot read an environment's .pth files, nothing of lowtide runs yet."""
    least = 1 + max(n for n in range(3, 12) if not _python_starts(n))
    done = run("generate", DEMO, "1+1", prepare=f"ulimit -n {least + more};")
    check_is_one_line(done, "ulimit -n")


def _python_starts(files: int) -> bool:
    command = f'ulimit -n {files}; exec "$@"'
    program = [sys.executable, "-c", ""]
    done = subprocess.run(
        ["bash", "-c", command, "bash", *program], capture_output=True, check=False
    )
    return done.returncode == 0 and not done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["generate", DEMO, "1+1"], ["plan", DEMO], ["plan", DEMO, "--json"], ["ls"], ["--help"]],
)
def test_an_answer_that_cannot_be_written_is_no_success(arguments: list[str]) -> None:
    check_is_one_line(run(*arguments, prepare="exec >&-;"), "Standard output cannot be written")


def test_messages_that_cannot_be_written_are_no_failure() -> None:
    done = run("generate", DEMO, "--prompt-ids", "1 2", "--max-tokens", "1", prepare="exec 2>&-;")
    assert done.returncode == 0 and done.stdout


def raising(error: Exception) -> Callable[[], object]:
    def read() -> object:
        raise error

    return read


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "No such file", "/proc/meminfo"), psutil.NoSuchProcess(1)]
)
def test_without_proc(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", raising(error))
    monkeypatch.setattr(psutil, "Process", raising(error))
    monkeypatch.setattr(Path, "read_text", lambda *a, **k: raising(FileNotFoundError(2, "x"))())
    for asked in (
        memory.total_memory_bytes,
        memory.available_memory_bytes,
        memory.resident_bytes,
        memory.peak_resident_bytes,
    ):
        with pytest.raises(UsageError, match="/proc cannot be read.*Mount it"):
            asked()


def test_an_address_space_without_a_limit_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (resource.RLIM_INFINITY, memory.ADDRESS_BYTES):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
        memory.check_address_space()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (700 << 20, 700 << 20))
    with pytest.raises(PlanError, match="limited to 700 MiB .ulimit -v.; .* 1024 MiB. Raise"):
        memory.check_address_space()
