"""Room that control groups leave a process: made-up folders, and a real group where one can be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lowtide.hardware import memory
from lowtide.hardware.control_group import group_free_bytes, group_limit_bytes
from lowtide.hardware.memory import available_memory_bytes, total_memory_bytes


def write_group(folder: Path, limit: str, usage: int, cache: int, is_v1: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current", "inactive_file")
    if is_v1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\nunevictable 0\n")


@pytest.mark.parametrize("is_v1", [False, True])
def test_the_tightest_group_counts_and_cached_files_do_not(tmp_path: Path, is_v1: bool) -> None:
    root, membership = tmp_path / "root", tmp_path / "membership"
    top = root / "memory" if is_v1 else root
    line = "4:cpu,memory:/a/b" if is_v1 else "0::/a/b"
    membership.write_text(f"9:pids:/a/b\n{line}\n")
    unlimited = str((1 << 63) - 4096) if is_v1 else "max"
    write_group(top / "a" / "b", unlimited, 5000, 0, is_v1)
    assert group_free_bytes(root, membership) is None
    write_group(top, "9000", 8000, 300, is_v1)
    assert group_free_bytes(root, membership) == 1300
    write_group(top / "a", "5000", 4500, 100, is_v1)
    assert group_free_bytes(root, membership) == 600
    write_group(top / "a", "5000", 5400, 100, is_v1)
    assert group_free_bytes(root, membership) == 0


def test_a_machine_without_groups_limits_nothing(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    assert group_free_bytes(tmp_path, membership) is None
    membership.write_text("0::/somewhere/unseen\n")
    assert group_free_bytes(tmp_path, membership) is None


def test_available_is_what_a_group_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "group_free_bytes", lambda: 4096)
    assert available_memory_bytes() == 4096


@pytest.mark.parametrize("is_v1", [False, True])
@pytest.mark.parametrize("depth", range(4))
def test_the_total_is_the_least_limit_of_nested_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_v1: bool, depth: int
) -> None:
    """A batch system nests a job's group in its own: the job's share is what counts."""
    root, membership = tmp_path / "root", tmp_path / "membership"
    top = root / "memory" if is_v1 else root
    membership.write_text("4:memory:/slurm/job/step\n" if is_v1 else "0::/slurm/job/step\n")
    unlimited = str((1 << 63) - 4096) if is_v1 else "max"
    folders = [top, top / "slurm", top / "slurm" / "job", top / "slurm" / "job" / "step"]
    for folder in folders:
        write_group(folder, unlimited, 0, 0, is_v1)
    assert group_limit_bytes(root, membership) is None
    write_group(folders[depth], str(1 << 20), 0, 0, is_v1)
    assert group_limit_bytes(root, membership) == 1 << 20
    write_group(folders[-1], str(1 << 30), 0, 0, is_v1)
    write_group(folders[depth], str(1 << 20), 0, 0, is_v1)
    assert group_limit_bytes(root, membership) == 1 << 20
    monkeypatch.setattr(memory, "group_limit_bytes", lambda: group_limit_bytes(root, membership))
    assert total_memory_bytes() == 1 << 20


def test_a_slowing_limit_counts_where_it_is_the_least(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("0::/job\n")
    write_group(tmp_path / "job", "9000", 0, 0, is_v1=False)
    (tmp_path / "job" / "memory.high").write_text("7000\n")
    assert group_limit_bytes(tmp_path, membership) == 7000


# A real group, as a batch system makes one for a job.


def own_groups() -> Iterator[tuple[Path, str]]:
    """Memory groups of this process, with the name of the file that limits one."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield Path("/sys/fs/cgroup/memory") / path.lstrip("/"), "memory.limit_in_bytes"
        elif not controllers:
            yield Path("/sys/fs/cgroup") / path.lstrip("/"), "memory.max"


@contextmanager
def real_job(limit_bytes: int) -> Iterator[Path]:
    """A group with a limit, and one for a step in it, below this process's own; skips without."""
    made: list[Path] = []
    try:
        if not any(made_job(group, limit, limit_bytes, made) for group, limit in own_groups()):
            pytest.skip("no control group with a limit of memory can be made here")
        yield made[-1]
    finally:
        for folder in reversed(made):
            folder.rmdir()


def made_job(group: Path, limit: str, limit_bytes: int, made: list[Path]) -> bool:
    job = group / f"lowtide-test-{os.getpid()}"
    try:
        for folder in (job, job / "step"):
            folder.mkdir()
            made.append(folder)
        # Version 2 has this file where its parent hands the controller on.
        with open(job / limit, "r+") as file:
            file.write(str(limit_bytes))
    except OSError:
        return False
    return True


def run_in(group: Path, command: Sequence[str]) -> Any:
    """What a command prints as JSON, run in a group."""
    joining = ["sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh"]
    done = subprocess.run([*joining, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_half_is_half_of_the_job_in_a_real_group() -> None:
    look = (
        "import json; from lowtide.hardware.memory import *; "
        "print(json.dumps([total_memory_bytes(), available_memory_bytes()]))"
    )
    plan = ("plan", "demo:autoregressive", "--host-memory", "50%", "--json")
    with real_job(1 << 30) as step:
        total, available = run_in(step, [sys.executable, "-c", look])
        assert total == 1 << 30 and 0 < available < total
        told = run_in(step, [sys.executable, "-m", "lowtide", *plan])
    assert told["budget_bytes"] == 1 << 29
