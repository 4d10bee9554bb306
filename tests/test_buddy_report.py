"""The command that profiles buddies, its report and its pictures."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from buddy_counts import direct_profile, random_routing
from test_buddy_counts import made
from typer.testing import CliRunner

from lowtide.cli.app import app
from lowtide.errors import StorageError, UnsupportedError
from lowtide.lab import plotting
from lowtide.lab.buddy_report import (
    as_object,
    drawn_layers,
    layer_reports,
    likeness,
    plot,
    top_peers,
)
from lowtide.lab.demo_text import held_out_text
from lowtide.policies.buddy_lists import BuddyRule, Ranking
from lowtide.policies.buddy_profile import BuddyProfile
from lowtide.replay.calibration import Calibration


def profile_of_made() -> BuddyProfile:
    profile = made().buddies
    assert profile is not None
    return profile


def test_layers_are_reported_by_the_rule() -> None:
    profile = profile_of_made()
    lists = profile.lists()
    for layer, report in enumerate(layer_reports(profile)):
        assert report.alpha == (0.5, 0.6, 1.0)[layer]
        assert report.list_length == lists.lengths[layer][profile.activations[layer] > 0].mean()
        assert 1 <= report.list_length <= report.reaches_alpha <= 7
        assert report.concentration == profile.concentration()[layer]
        assert report.affinity == profile.affinity()[layer]
        assert report.entropy[0] <= report.entropy[1]
    json.dumps(json.loads(json.dumps(as_object(profile), default=lambda array: array.tolist())))


def test_the_foremost_peers_by_hand() -> None:
    """Six experts in pairs of two: one peer has all. All pairs alike: four of five peers."""
    pairs = [[0, 1], [2, 3], [4, 5]]
    every = [[i, j] for i in range(6) for j in range(i + 1, 6)]
    for tokens, share in ((pairs, 1.0), (every, 0.8)):
        routed = [(np.array(tokens), np.ones((len(tokens), 2), np.float32))]
        assert top_peers(direct_profile(routed, 6)) == pytest.approx([share])


def slow_ranks(values: list[float]) -> list[float]:
    """Of equal values their mean rank."""
    below = [sum(other < value for other in values) for value in values]
    return [low + (values.count(value) + 1) / 2 for low, value in zip(below, values, strict=True)]


def test_likeness_is_counted_slowly() -> None:
    profile = profile_of_made()
    reports, first = likeness(profile), profile.lists().ids[:, :, 0]
    assert reports is not None and profile.output_similarity is not None
    is_pair = ~np.eye(8, dtype=bool)
    for layer, outputs in enumerate(profile.output_similarity):
        q = profile.q(smoothing=0.0)[layer]
        ranks = [slow_ranks(each[is_pair].tolist()) for each in (q, outputs)]
        assert reports[layer].correlation == pytest.approx(np.corrcoef(*ranks)[0, 1])
        assert reports[layer].pairs == pytest.approx(outputs[is_pair].mean(), abs=1e-6)
        seen = np.flatnonzero(profile.activations[layer]).tolist()
        buddies = [outputs[i, first[layer, i]] for i in seen]
        best = [max(outputs[i, j] for j in range(8) if j != i) for i in seen]
        assert reports[layer].first_buddy == pytest.approx(np.mean(buddies), abs=1e-6)
        assert reports[layer].most_alike == pytest.approx(np.mean(best), abs=1e-6)
    assert likeness(dataclasses.replace(profile, output_similarity=None)) is None


def test_pictures_are_drawn_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = plot(profile_of_made(), tmp_path / "plots")
    assert [file.read_bytes()[1:4] for file in files] == [b"PNG"] * 5
    # More experts than a list may have buddies.
    wide = direct_profile(random_routing(0, 1, 70, 2, 10), 70)
    assert len(plot(wide, tmp_path / "wide")) == 3
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        plot(wide, tmp_path / "file")
    monkeypatch.setattr(plotting, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'lowtide\[plot\]'"):
        plot(wide, tmp_path)


def test_of_many_layers_some_are_drawn() -> None:
    assert drawn_layers(5) == [0, 1, 2, 3, 4]
    many = drawn_layers(60)
    assert len(many) == 12 and many[0] == 0 and many[-1] == 59
    assert set(np.diff(many).tolist()) <= {5, 6}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_text(held_out_text()[:3000], encoding="utf-8")
    return path


@pytest.mark.parametrize("model", ["demo:chat", "demo:diffusion"])
def test_the_command(text: Path, tmp_path: Path, model: str) -> None:
    out, plots = tmp_path / "c.lowtide", tmp_path / "plots"
    given = ["calibrate", model, "--text", str(text), "--pieces", "4", "--context", "256"]
    given += ["--buddies", "--out", str(out)]
    more = ["--alpha", "0.8", "--k-max", "8", "--similarity", "outputs"]
    more += ["--plot", str(plots)] if model == "demo:chat" else []
    result = CliRunner().invoke(app, [*given, *more, "--json"])
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)["buddies"]
    profile = Calibration.load(out).buddies
    assert profile is not None and profile.rule == BuddyRule(0.8, 8)
    assert answer["num_tokens"] == profile.num_tokens
    assert answer["list_lengths"] == profile.lists().lengths.tolist()
    assert (
        0 < answer["layers"][0]["concentration"] < 1
        and answer["layers"][0]["likeness"]["pairs"] < 1
    )
    drawn = {Path(path).name for path in json.loads(result.stdout)["plots"]}
    assert model != "demo:chat" or drawn >= {"co-activation.png", "output-similarity.png"}


def test_the_command_fits_and_ranks(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "c.lowtide"
    given = ["calibrate", "demo:chat", "--text", str(text), "--pieces", "4", "--context", "256"]
    given += ["--buddies", "--list-size", "3", "--ranking", "weights", "--out", str(out)]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.stderr
    assert "buddies by weights" in result.stdout and "concentration" in result.stdout
    profile = Calibration.load(out).buddies
    assert profile is not None and profile.rule.ranking is Ranking.WEIGHTS
    lengths = profile.lists().lengths
    assert ((lengths.mean(axis=1) > 2.5) & (lengths.mean(axis=1) <= 3)).all()


def test_what_cannot_be_profiled_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("some words, more words, " * 10, encoding="utf-8")
    (tmp_path / "one").write_text("a", encoding="utf-8")
    short = ["--text", str(tmp_path / "short"), "--pieces", "2", "--context", "64", "--buddies"]
    for arguments, reason in (
        (["--alpha", "0.5"], "--alpha is about buddies; add --buddies"),
        (["--buddies", "--alpha", "0"], "above 0 and at most 1, not 0"),
        (["--buddies", "--alpha", "0.9,1.5"], "above 0 and at most 1, not 1.5"),
        (["--buddies", "--alpha", "nan"], "above 0 and at most 1"),
        (["--buddies", "--alpha", "most"], "expected a number"),
        (["--buddies", "--alpha", "0.5", "--list-size", "4"], "leave --alpha out"),
        (["--buddies", "--k-max", "0"], "k_max must be from 1 to 64"),
        (["--buddies", "--smoothing", "-1"], "smoothing must be at least 0"),
        (["--buddies", "--ranking", "fame"], "co-activation or weighted or outputs or weights"),
        (["--buddies", "--similarity", "outputs,fame"], "outputs or weights, not 'fame'"),
        (
            [*short, "--buddies", "--context", "64", "--alpha", "0.9,0.9"],
            "2 values and the model 5",
        ),
        ([*short, "--buddies", "--context", "64", "--list-size", "99"], "from 1 to 31"),
        ([*short, "--buddies", "--context", "64"], "least 128 tokens"),
        (["--text", str(tmp_path / "one"), "--buddies"], "give 128 tokens or more in --pieces 16"),
    ):
        result = CliRunner().invoke(app, ["calibrate", "demo:chat", *arguments])
        assert result.exit_code in (1, 2), arguments
        assert result.stderr.startswith("lowtide: ") and reason in result.stderr, result.stderr
