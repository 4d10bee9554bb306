"""The race of presets by batch: its rows are whole and its answers agree; no speed is judged."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

from lowtide.errors import UsageError
from lowtide.lab.synth import synth

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
batches = import_module("batches")


def test_presets_take_turns_on_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "model", tmp_path / "rows.jsonl"
    synth("qwen3_moe", "tiny", model)
    command = f"batches --model {model} --out {out} --quick --presets dali lru all-host "
    command += "--batches 1 5 --prompt 4 --warm 1 --new 2 --prefill 24 --lengths 2 3 --pieces 2"
    monkeypatch.setattr(sys, "argv", command.split())
    batches.main()
    capsys.readouterr()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert all("emulated" in row["device"] for row in rows if row["what"] != "early gates")
    for phase in ("decode", "prefill"):
        lanes = {row["preset"]: row for row in rows if row["what"] == phase}
        assert lanes.keys() == {"resident", "dali", "lru", "all-host"}
        assert all(row["same_ids"] and row["tokens_per_s"] > 0 for row in lanes.values())
        assert lanes["resident"]["per_pass"]["num_misses"] == 0
        assert lanes["lru"]["per_pass"]["num_on_host"] == 0
        counts = lanes["all-host"]["per_pass"]
        assert counts["num_on_host"] == counts["num_hits"] + counts["num_misses"] > 0
    planning = [row for row in rows if row["what"] == "planning"]
    assert [row["num_new"] for row in planning] == [2, 3]
    for share in ("planning_share", "planning_share_unscaled"):
        assert all(0 < row[share] < 1 for row in planning)


def test_ratios_need_dali(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["batches", "--presets", "lru"])
    with pytest.raises(UsageError, match="--presets"):
        batches.main()
