"""The command that profiles buddies, and its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_buddy_counts import made
from typer.testing import CliRunner

from lowtide.cli.app import app
from lowtide.lab.buddy_report import as_object, layer_reports
from lowtide.model_folder.demo_tasks import held_out_text
from lowtide.replay.calibration import Calibration


def test_layers_are_reported() -> None:
    profile = made().buddies
    assert profile is not None
    lists = profile.lists()
    for layer, report in enumerate(layer_reports(profile)):
        is_seen = profile.activations[layer] > 0
        assert report.list_length == (lists[layer][is_seen] >= 0).sum(axis=1).mean()
        assert 1 <= report.list_length <= report.reaches_alpha <= 7
        assert report.concentration == profile.concentration()[layer]
        assert report.affinity == profile.affinity()[layer]
        assert report.entropy[0] <= report.entropy[1]
    assert json.loads(json.dumps(as_object(profile)))["num_tokens"] == profile.num_tokens


def test_the_command(tmp_path: Path) -> None:
    text, out = tmp_path / "text.py", tmp_path / "c.lowtide"
    text.write_text(held_out_text()[:3000], encoding="utf-8")
    given = ["calibrate", "demo:chat", "--text", str(text), "--pieces", "4", "--context", "256"]
    given += ["--buddies", "--out", str(out)]
    result = CliRunner().invoke(app, [*given, "--json"])
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)["buddies"]
    profile = Calibration.load(out).buddies
    assert profile is not None and answer["num_tokens"] == profile.num_tokens
    assert 0 < answer["layers"][0]["concentration"] < 1
    result = CliRunner().invoke(app, given)
    assert "buddies, alpha 0.95, at most 16 of 31" in result.stdout
    assert "concentration" in result.stdout


@pytest.mark.parametrize(("length", "reason"), [(1, "give 128 tokens"), (100, "least 128 tokens")])
def test_a_text_that_is_too_short_is_refused(tmp_path: Path, length: int, reason: str) -> None:
    (tmp_path / "short").write_text(("some words, more words, " * 10)[:length], encoding="utf-8")
    given = ["--text", str(tmp_path / "short"), "--context", "64", "--buddies"]
    result = CliRunner().invoke(app, ["calibrate", "demo:chat", *given])
    assert result.exit_code in (1, 2)
    assert result.stderr.startswith("lowtide: ") and reason in result.stderr, result.stderr
