"""What a process's control groups leave it, from folders like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide.hardware import memory
from lowtide.hardware.control_group import group_free_bytes
from lowtide.hardware.memory import available_memory_bytes


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
