"""`benchmarks/absent.py`: what it divides by what; no speed is judged here."""

from __future__ import annotations

from argparse import Namespace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lowtide.model_writing.synth import synth

absent = import_module("absent")
ceilings = import_module("common.ceilings")

OPTIONS = Namespace(prompt=8, new=8, repeats=2, read_bytes=1 << 20)


def test_a_pass_stands_beside_the_resident_one_and_its_own_bytes() -> None:
    lane = SimpleNamespace(policy="lru", share=0.5, expert_bytes=1_000_000, num_layers=4)
    resident = [absent.Pass(0.010, 0.020, 0.008, 0.0, 0.0)] * 3
    passes = [absent.Pass(s, 0.048, 0.012, 5.0, 6e6) for s in (0.030, 0.024, 0.018)]
    row = absent._row(lane, passes, resident, [(2e-9, 4e-9 / 5)] * 3)
    # 5 MB at 0.5 GB/s take 10 ms, at 0.8 ns of processor time a byte 4 ms.
    assert row["over_bound"] == pytest.approx(24 / 20)
    assert row["over_bound_range"] == pytest.approx([18 / 20, 30 / 20])
    assert row["cpu_over_bound"] == pytest.approx(48 / 24)
    assert row["engine_excess_us_per_layer"] == pytest.approx(1000)
    assert (row["pass_ms"], row["absent_per_pass"], row["read_MB_per_pass"]) == (24, 5, 6)
    assert row["two_readers_GBps"] == pytest.approx(0.5)
    assert "lru" in absent._line({"model": "m", **row})


@pytest.mark.parametrize("family", ["qwen3_moe", "llada2"])
def test_only_lanes_with_less_than_everything_read(family: str, tmp_path: Path) -> None:
    model = synth(family, "tiny", tmp_path / family)
    first, *others = absent._measured([model], (0.5,), OPTIONS)
    assert first["policy"] == "resident" and first["over_bound"] == 1
    assert first["absent_per_pass"] == first["read_MB_per_pass"] == 0
    assert [row["policy"] for row in others] == ["lru", "lowtide"]
    for row in others:
        assert row["absent_per_pass"] > 0 and row["read_MB_per_pass"] > 0
        assert row["pass_ms"] > 0 and row["cpu_over_bound"] > 0


def test_two_readers_fill_slots_with_what_files_have(tmp_path: Path) -> None:
    content = np.random.default_rng(0).integers(2, 256, 5 << 20, dtype=np.uint8)
    (tmp_path / "weights").write_bytes(content.tobytes())
    reads = ceilings.SlotReads([tmp_path / "weights"], 100_000)
    try:
        seconds, cpu_s = reads.measure(4 << 20)
    finally:
        reads.close()
    assert seconds > 0 and cpu_s > 0
    slot = reads._slots[: 100_000 // 4096 * 4096]
    assert slot.tobytes() in content.tobytes()
