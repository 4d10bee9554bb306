"""`benchmarks/absent.py`: what it divides by what; no speed is judged here."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lowtide.memory.arena import Arena
from lowtide.model_writing.synth import synth

absent = import_module("absent")
ceilings = import_module("common.ceilings")


class Lane:
    """A lane whose passes are known: of the first answer, which warms up, and of three others."""

    name, expert_bytes, num_layers = "m", 1_000_000, 4

    def __init__(self, stack: Any, model: Path, policy: str, share: float, options: Any) -> None:
        self.policy, self.share = policy, share

    def answer(self, seed: int) -> Any:
        if self.policy == "resident":
            return absent.Pass(0.010, 0.020, 0.008, 0.0, 0.0)
        return absent.Pass((9.0, 0.030, 0.024, 0.018)[seed], 0.048, 0.012, 5.0, 6e6)


class Reads:
    """Reads at known rates."""

    def __init__(self, files: list[Path], expert_bytes: int) -> None:
        assert files

    def measure(self, total_bytes: int, seed: int = 0) -> tuple[float, float]:
        return 2e-9, 4e-9 / 5

    def close(self) -> None:
        pass


def run(
    model: Path, out: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> list[dict[str, Any]]:
    """The rows of the script's first part."""
    told = ["absent.py", "--model", str(model), "--parts", "tmpfs", "--out", str(out), *arguments]
    monkeypatch.setattr(sys, "argv", told)
    monkeypatch.setattr(absent, "memory_ceiling", dict)
    monkeypatch.setattr(absent, "TMPFS", out.parent)  # there may be none here
    monkeypatch.setattr(absent, "SHARES", {})
    absent.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    return [row for row in rows if row["what"] == "tmpfs"]


def test_a_pass_stands_beside_the_resident_one_and_its_own_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(absent, "Lane", Lane)
    monkeypatch.setattr(absent, "SlotReads", Reads)
    model = synth("qwen3_moe", "tiny", tmp_path / "tiny")
    _, row, _ = run(model, tmp_path / "out", monkeypatch, "--repeats", "3")
    # 5 MB at 0.5 GB/s take 10 ms, at 0.8 ns of processor time a byte 4 ms.
    assert row["over_bound"] == pytest.approx(24 / 20)
    assert row["over_bound_range"] == pytest.approx([18 / 20, 30 / 20])
    assert row["cpu_over_bound"] == pytest.approx(48 / 24)
    assert row["engine_excess_us_per_layer"] == pytest.approx(1000)
    assert (row["pass_ms"], row["absent_per_pass"], row["read_MB_per_pass"]) == (24, 5, 6)
    assert row["two_readers_GBps"] == pytest.approx(0.5)
    assert "lru" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["qwen3_moe", "llada2"])
def test_only_lanes_with_less_than_everything_read(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = synth(family, "tiny", tmp_path / family)
    monkeypatch.setattr(absent, "READ_BYTES", 1 << 20)
    arguments = ("--prompt", "8", "--new", "8", "--repeats", "2")
    first, *others = run(model, tmp_path / "out", monkeypatch, *arguments)
    assert first["policy"] == "resident" and first["over_bound"] == 1
    assert first["absent_per_pass"] == first["read_MB_per_pass"] == 0
    assert [row["policy"] for row in others] == ["lru", "lowtide"]
    for row in others:
        assert row["absent_per_pass"] > 0 and row["read_MB_per_pass"] > 0
        assert row["pass_ms"] > 0 and row["cpu_over_bound"] > 0


def test_two_readers_fill_slots_with_what_files_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arenas: list[Arena] = []

    def arena(num_bytes: int) -> Arena:
        arenas.append(Arena(num_bytes))
        return arenas[-1]

    monkeypatch.setattr(ceilings, "Arena", arena)
    content = np.random.default_rng(0).integers(2, 256, 5 << 20, dtype=np.uint8)
    (tmp_path / "weights").write_bytes(content.tobytes())
    reads = ceilings.SlotReads([tmp_path / "weights"], 100_000)
    try:
        seconds, cpu_s = reads.measure(4 << 20)
    finally:
        reads.close()
    assert seconds > 0 and cpu_s > 0
    [slots] = arenas
    slot = slots.array()[: 100_000 // 4096 * 4096]
    assert slot.tobytes() in content.tobytes()
