"""`benchmarks/batch.py`: what it counts; no speed is judged."""

from __future__ import annotations

import json
from importlib import import_module

import pytest

batch = import_module("batch")


def test_both_ways_have_the_same_tokens_and_passes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--lines", "12", "--new", "9", "--repeats", "2", "--context", "1024")
    monkeypatch.setattr("sys.argv", ["batch.py", *options])
    batch.main()
    own, long = map(json.loads, capsys.readouterr().out.splitlines())
    assert (own["answers"], long["answers"]) == ("the model's own", "of 9 tokens")
    assert long["num_tokens"] == 12 * 9 and 12 < own["num_tokens"]
    for line in (own, long):
        assert line["settings"]["num_lines"] == 12
        assert len(line["each_over_generate"]) == len(line["each_cpu_ms_above"]) == 2
        assert max(line["each_passes_over_generate"]) <= 1.1
