"""Recording a run's routing, and replaying it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lowtide import LLM, DiffusionParams, SamplingParams
from lowtide.cli.app import app
from lowtide.core import StepKind
from lowtide.lab.record import recorded
from lowtide.replay.trace import Trace

MODEL = Path(__file__).parent / "goldens" / "llada2-a"


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "run.trace"
    params = SamplingParams(max_tokens=24, diffusion=DiffusionParams(block_length=8, steps=8))
    with LLM(MODEL, context=128) as llm, recorded(llm, path, "golden"):
        llm.generate([list(range(1, 20))], params)
    return path


def test_a_trace_holds_every_pass_and_every_committed_token(trace_file: Path) -> None:
    trace = Trace.load(trace_file)
    assert trace.model == "golden"
    assert trace.num_committed == 24
    assert trace.shape[:3] == (3, 32, 4)
    assert {one.step.kind for one in trace.passes} == {StepKind.DENOISE}
    assert trace.passes[0].num_rows == 24  # two prompt blocks and the first block
    assert len({one.block for one in trace.passes}) == 4


def test_simulate_replays_it(trace_file: Path) -> None:
    arguments = ["simulate", str(trace_file), "--presets", "tide,lru,dali", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    runs = json.loads(result.stdout)["runs"]
    assert [run["preset"] for run in runs] == ["tide", "lru", "dali"]
    assert all(run["tokens_per_s"] > 0 and run["num_tokens"] == 24 for run in runs)


@pytest.mark.parametrize("place", ["absent/run.trace", "."])
def test_a_place_for_no_trace_is_refused_before_loading(place: str, tmp_path: Path) -> None:
    arguments = ["generate", str(MODEL), "--prompt-ids", "5 17", "--trace", str(tmp_path / place)]
    result = CliRunner().invoke(app, [*arguments, "--host-memory", "1KiB"])  # no plan has room
    assert result.exit_code == 1 and "cannot be written" in result.stderr


def test_what_cannot_be_replayed_is_refused(trace_file: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    bad = tmp_path / "bad.trace"
    bad.write_bytes(trace_file.read_bytes()[:100])
    empty = tmp_path / "empty.trace"
    Trace.load(trace_file).beginning(0).save(empty)
    for arguments in (
        [str(bad)],
        [str(empty)],
        [str(tmp_path / "absent")],
        [str(trace_file), "--presets", "nonsense"],
        [str(trace_file), "--machine", "abacus"],
    ):
        result = runner.invoke(app, ["simulate", *arguments])
        assert result.exit_code in (1, 2)
        assert result.stderr.startswith("lowtide: ")
