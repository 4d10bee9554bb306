"""Recording a run's routing, and replaying it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from buddy_cases import random_profile
from click.testing import Result
from typer.testing import CliRunner

from lowtide import LLM, DiffusionParams, SamplingParams
from lowtide.cli.app import app
from lowtide.core import MoEShape, StepKind
from lowtide.lab.profiles import load_profile
from lowtide.lab.simulation.simulator import compare
from lowtide.policies.catalogue import CATALOGUE
from lowtide.policies.presets import parse_options, register, unregister
from lowtide.policies.recipe import PolicyInputs
from lowtide.record import recorded
from lowtide.replay.calibration import Calibration, GateAccuracy
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
    arguments = ["simulate", str(trace_file), "--policy", "tide,lru,dali", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    runs = json.loads(result.stdout)["runs"]
    assert [run["preset"] for run in runs] == ["tide", "lru", "dali"]
    ceiling = ["simulate", str(trace_file), "--policy", "oracle,lru", "--policy-option", "tau=2"]
    assert "None of the policies lru has an option" in CliRunner().invoke(app, ceiling).stderr
    result = CliRunner().invoke(app, [*ceiling[:4], "--json"])
    oracle, lru = json.loads(result.stdout)["runs"]
    assert (oracle["preset"], lru["preset"]) == ("oracle", "lru")
    assert all(run["tokens_per_s"] > 0 and run["num_tokens"] == 24 for run in runs)


@pytest.fixture(scope="module")
def calibration(trace_file: Path) -> Path:
    """With buddies, of the same model."""
    trace = Trace.load(trace_file)
    layers, experts, k = trace.shape[:3]
    counts = np.zeros((2, layers - 1))
    Calibration(
        "golden",
        "0" * 64,
        "2026-11-22",
        trace=trace,
        residual=np.zeros((layers - 1, trace.shape.hidden_size), np.float32),
        frequency=np.ones((layers, experts)),
        following=np.zeros((layers - 1, experts, experts)),
        accuracy=GateAccuracy(counts, np.zeros((2, layers - 1, 4)), counts),
        buddies=random_profile(layers, experts, k),
    ).save(trace_file.with_name("model.calibration"))
    return trace_file.with_name("model.calibration")


def simulated(trace: Path, options: list[str], *others: str) -> Result:
    """`lowtide simulate` of two presets, one of them BuddyMoE."""
    pairs = [part for one in options for part in ("--policy-option", one)]
    arguments = ["simulate", str(trace), "--policy", "buddymoe,lru", *pairs, *others]
    return CliRunner().invoke(app, arguments)


def test_buddies_are_simulated_with_the_calibrations_profile(
    trace_file: Path, calibration: Path
) -> None:
    """The policies themselves do the same with this trace, setting and profile."""
    options = {"miss": "buddy", "rho": "none", "placement": "lru", "max_mass": "off"}
    given = [f"{name}={value}" for name, value in options.items()]
    told = simulated(trace_file, given, "--calibration", str(calibration), "--json")
    assert told.exit_code == 0, told.stderr
    buddymoe, lru = json.loads(told.stdout)["runs"]
    trace, profile = Trace.load(trace_file), Calibration.load(calibration).buddies
    setting = PolicyInputs(
        [16] * trace.shape.num_layers,
        trace.shape.num_experts,
        load_profile("rtx3090").costs(MoEShape(*trace.shape)),
        options=parse_options("buddymoe", options),
        buddies=profile,
    )
    [alone] = compare(trace, ["buddymoe"], setting)
    for name in ("num_substituted", "moved_share", "num_fetched", "total_s"):
        assert buddymoe[name] == getattr(alone, name), name
    assert buddymoe["num_substituted"] > 0 and lru["num_substituted"] == 0
    table = simulated(trace_file, given, "--calibration", str(calibration)).stdout
    assert "0.00%" in table


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["miss=buddy"], "lowtide calibrate --buddies"),
        (["miss=sometimes"], "miss must be"),
        (["volume=11"], "None of the policies buddymoe, lru has an option 'volume'"),
        (["miss=buddy", "placement=lru", "tau=3"], "placement=lru has no option 'tau'"),
        (["tau=paper"], "give a number, or auto"),
    ],
)
def test_policy_options_that_cannot_be_replayed(
    trace_file: Path, options: list[str], said: str
) -> None:
    result = simulated(trace_file, options)
    assert result.exit_code == 2 and said in result.stderr


def test_a_replay_knows_no_router_logits(trace_file: Path) -> None:
    register(
        "toy",
        replace(CATALOGUE["lru"], substitution=lambda s: lambda facts: None, asks_scores=True),
    )
    try:
        result = CliRunner().invoke(app, ["simulate", str(trace_file), "--policy", "toy"])
    finally:
        unregister("toy")
    assert result.exit_code == 2 and "traces do not hold" in result.stderr


@pytest.mark.parametrize("place", ["file/run.trace", "."])
def test_a_place_for_no_trace_is_refused_before_loading(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
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
        [str(trace_file), "--policy", "nonsense"],
        [str(trace_file), "--machine", "abacus"],
    ):
        result = runner.invoke(app, ["simulate", *arguments])
        assert result.exit_code in (1, 2)
        assert result.stderr.startswith("lowtide: ")
