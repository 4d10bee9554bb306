"""What the machine says of its memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest

from lowtide import hardware


def test_sizes_are_in_order() -> None:
    assert 0 < hardware.resident_bytes() <= hardware.total_memory_bytes()
    assert 0 < hardware.available_memory_bytes() <= hardware.total_memory_bytes()
    assert hardware.total_memory_bytes() <= psutil.virtual_memory().total


def test_touched_pages_become_resident() -> None:
    before = hardware.resident_bytes()
    block = np.ones(32 << 20, np.uint8)
    assert hardware.resident_bytes() - before > 24 << 20
    del block


@pytest.mark.parametrize(
    ("text", "is_limit"), [("1048576\n", True), ("max\n", False), ("9223372036854771712", False)]
)
def test_a_control_group_limits_the_total(
    text: str, is_limit: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "memory.max"
    path.write_text(text)
    monkeypatch.setattr(hardware, "_CGROUP_LIMITS", (tmp_path / "missing", path))
    machine_bytes = psutil.virtual_memory().total
    assert hardware.total_memory_bytes() == (1 << 20 if is_limit else machine_bytes)
    assert hardware.available_memory_bytes() <= hardware.total_memory_bytes()
