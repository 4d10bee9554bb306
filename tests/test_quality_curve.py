"""The dial's receipt in the table, and the curve of mass and KL that a profile keeps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from typer.testing import CliRunner

from lowtide import LLM, SamplingParams
from lowtide.cli.app import app
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.model import open_model
from lowtide.errors import StorageError, UsageError
from lowtide.lab.calibrate import calibrate
from lowtide.lab.quality import QualityReport, QualityWork, quality
from lowtide.lab.quality_curve import curve_path, keep_curve, measured_curve
from lowtide.lab.quality_settings import MASSES, QualitySetting, curve_settings
from lowtide.lab.quality_text import Scope
from lowtide.model_writing.synth import synth
from lowtide.replay.calibration import Calibration

SCOPE = Scope(num_tokens=90, window_tokens=80)
BUDDY = {"placement": "lru", "rho": "none", "miss": "buddy"}
IDS = np.random.default_rng(1).integers(3, 300, 700).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth("qwen3_moe", "tiny", tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def calibration(model: Path) -> Iterator[Path]:
    with LLM(model, context=512) as llm:
        made = calibrate(llm, IDS, "m", num_pieces=4, buddies=True)
    path = model.parent / "calibration"
    made.save(path)
    yield path


@pytest.fixture(scope="module")
def report(model: Path, calibration: Path) -> QualityReport:
    settings = [QualitySetting("lru", residents=0.25)]
    for setting in curve_settings(BUDDY)[::3]:
        settings.append(QualitySetting(setting.policy, setting.policy_options, residents=0.25))
    settings.append(QualitySetting("buddymoe", {**BUDDY, "miss": "wait"}, residents=0.25))
    work = QualityWork(IDS, scope=SCOPE, repeats=0, text_sha256="1" * 64)
    options: dict[str, Any] = {"context": 128, "calibration": str(calibration)}
    return quality(model, settings, work, **options)


def test_rows_carry_the_receipt_of_the_text(report: QualityReport) -> None:
    exact, wait, *bounded = report.rows  # those that change no token come first
    assert exact.passes is not None and exact.passes.replaced is None and not exact.moved_share
    for row, mass in zip(bounded, MASSES[::3], strict=True):
        assert row.passes is not None and row.passes.replaced is not None
        assert row.moved_share <= float(mass)
        assert row.passes.replaced.num_affected <= row.passes.replaced.num_tokens
    shares = [row.moved_share for row in bounded]
    assert shares == sorted(shares) and 0 < shares[0] < shares[-1]
    assert bounded[-1].passes.replaced.saved_bytes > 0
    assert bounded[-1].passes.per_pass("read_bytes") < exact.passes.per_pass("read_bytes")
    assert bounded[-1].comparison.kl.mean > bounded[0].comparison.kl.mean > 0
    assert wait.comparison.kl.mean == 0 == wait.moved_share and wait.comparison.agreement.mean == 1
    found = json.loads(json.dumps(report.as_dict()))["rows"][3]["passes"]["replaced"]
    assert found["moved_share"] == bounded[1].moved_share


def test_the_curve_is_of_what_was_measured_and_is_kept(
    model: Path, calibration: Path, report: QualityReport
) -> None:
    curve = measured_curve(report)
    bounded = report.rows[2:]
    wanted = sorted({row.moved_share: row.comparison.kl.mean for row in bounded}.items())
    assert curve.mass.tolist() == [mass for mass, _ in wanted]
    assert curve.kl.tolist() == [kl for _, kl in wanted]
    assert curve.text_sha256 == report.text_sha256
    opened = open_model(model, EngineConfig(context=128, calibration=str(calibration)))
    assert curve_path(opened.facts, calibration) == calibration
    keep_curve(calibration, curve)
    kept = Calibration.load(calibration).buddies
    assert kept is not None and kept.curve is not None
    assert kept.curve.mass.tolist() == curve.mass.tolist()
    max_kl = float(curve.kl[0])
    options: dict[str, Any] = {"context": 128, "calibration": str(calibration)}
    policy = {**BUDDY, "max_kl": f"{max_kl:.17g}"}
    with LLM(model, policy="buddymoe", policy_options=policy, **options) as llm:
        params = SamplingParams(max_tokens=16, ignore_eos=True)
        [completion] = llm.generate([IDS[:32]], params)
    receipt = completion.usage.receipt
    assert receipt is not None and receipt.moved_share <= curve.max_mass(max_kl)


def test_without_buddies_or_substitutions_there_is_no_curve(model: Path, tmp_path: Path) -> None:
    work = QualityWork(IDS, scope=SCOPE, repeats=0)
    report = quality(model, [QualitySetting("lru")], work, context=128)
    with pytest.raises(UsageError, match="No setting replaced"):
        measured_curve(report)
    text = tmp_path / "text.txt"
    text.write_text("import os\n" * 400)
    arguments = ["quality", "demo:chat", "--text", str(text), "--save-curve"]
    done = CliRunner().invoke(app, arguments, env={"XDG_CACHE_HOME": str(tmp_path)})
    assert done.exit_code == 2 and "calibrate --buddies" in done.stderr.replace("\n", " ")


@pytest.fixture(scope="module")
def of_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration of the demo, with buddies."""
    path = tmp_path_factory.mktemp("demo") / "c.lowtide"
    with LLM("demo:chat", context=128) as llm:
        ids = np.random.default_rng(2).integers(3, llm.config.vocab_size, 700).tolist()
        calibrate(llm, ids, "m", num_pieces=4, buddies=True).save(path)
    return path


def test_what_was_measured_is_shown_though_there_is_no_curve(
    of_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all experts in memory none is replaced, which is known in the end alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = tmp_path / "text.txt"
    text.write_text("import os\n" * 400)
    asked = ["quality", "demo:chat", "--text", str(text), "--tokens", "60", "--window", "96"]
    asked += ["--context", "128", "--repeats", "0", "--calibration", str(of_demo), "--save-curve"]
    for more, shown in (([], "perplexity"), (["--json"], '"curve_path":null')):
        done = CliRunner().invoke(app, [*asked, *more])
        assert done.exit_code == 2 and "No setting replaced an expert" in done.stderr
        assert shown in done.stdout.replace(" ", ""), done.stdout


@pytest.mark.parametrize("error", [StorageError("the disk is full"), ValueError("of matplotlib")])
def test_what_was_measured_is_kept_and_shown_though_there_is_no_picture(
    error: Exception,
    report: QualityReport,
    of_demo: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> NoReturn:
        raise error

    kept = tmp_path / "kept"
    kept.write_bytes(of_demo.read_bytes())
    monkeypatch.setattr("lowtide.lab.quality.quality", lambda *_, **__: report)
    monkeypatch.setattr("lowtide.lab.quality_plot.plot", fails)
    asked = ["quality", "demo:chat", "--text", __file__, "--plot", str(tmp_path / "picture.svg")]
    asked += ["--context", "128", "--window", "96", "--calibration", str(kept), "--save-curve"]
    for more, shown in (([], "perplexity"), (["--json"], f'"curve_path":"{kept}"')):
        done = CliRunner().invoke(app, [*asked, *more])
        assert done.exit_code and shown in done.stdout.replace(" ", ""), done.stdout
        assert str(error) in f"{done.stderr}{done.exception}"
    buddies = Calibration.load(kept).buddies
    assert buddies is not None and buddies.curve is not None
    assert buddies.curve.mass.tolist() == measured_curve(report).mass.tolist()


def test_a_curve_of_questions_alone_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"context": "a", "choices": ["b", "c"], "answer": 0}))
    done = CliRunner().invoke(app, ["quality", "demo:chat", "--choices", str(path), "--save-curve"])
    assert done.exit_code == 2 and "give --text FILE" in done.stderr
