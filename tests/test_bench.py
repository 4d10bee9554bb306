"""`lowtide bench`: presets on one engine, ceilings, and what cannot run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lowtide import LLM, SamplingParams
from lowtide.cli.app import app
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.model import open_model
from lowtide.engine.planning.prediction import speed_key
from lowtide.errors import PlanError, UsageError
from lowtide.experts.account import Account, account_of
from lowtide.hardware.machine import Rate, this_machine
from lowtide.hardware.model_speeds import ModelSpeeds, keep_speeds
from lowtide.lab import bench as bench_module
from lowtide.lab.bench import Ceilings, Load, Preset, PresetRun, Result, bench, take_turns
from lowtide.lab.budgets import budget_of_share, home_of_share
from lowtide.llm import plan_model
from lowtide.policies.presets import preset_names

MODEL = Path(__file__).parent / "goldens" / "llada2-a"
FAST = {"link_GBps": "1000", "link_latency_us": "0", "host_slowdown": "1"}
EMULATED: dict[str, Any] = {"device": "emulated", "device_options": FAST}
PARAMS = SamplingParams(max_tokens=8)


def run(presets: list[Preset], repeats: int = 1, **options: Any) -> Result:
    return bench(MODEL, presets, None, PARAMS, repeats=repeats, context=128, **options)


def test_every_preset_is_measured_in_every_round() -> None:
    presets = [Preset("tide", {"tau": "1"}), Preset("lru"), Preset("layer-split")]
    result = run(presets, repeats=2, **EMULATED)
    assert [one.preset for one in result.runs] == presets
    for one in result.runs:
        assert len(one.turns) == 2 and one.policy == one.preset.name and not one.reason
        assert all(turn.num_tokens == 8 for turn in one.turns)
        assert one.tokens_per_s.least <= one.tokens_per_s.median <= one.tokens_per_s.most
        assert one.prefill_tokens_per_s.median > 0
        assert one.read_bytes_per_token == 0  # all at home in host memory
        assert 0 < one.hit_rate < 1
    tide, lru, split = result.runs
    assert lru.link_bytes_per_token > 0 == split.link_bytes_per_token
    assert result.plan.device == "emulated" and "emulated" in result.device


def test_without_a_budget_half_of_the_experts_is_resident() -> None:
    for options in ({}, EMULATED):
        result = run([Preset("static")], **options)
        plan = result.plan
        assert not result.is_budget_given
        assert sum(plan.residents_per_layer) == plan.num_experts // 2
    on_cpu = run([Preset("tide")], host_memory="80%")
    assert on_cpu.is_budget_given and on_cpu.runs[0].hit_rate == 1.0


def test_reads_from_disk_are_counted_per_token() -> None:
    plan = plan_model(MODEL, context=128)
    [cold] = run([Preset("tide")], host_memory=plan.minimum_bytes).runs
    assert cold.link_bytes_per_token == 0
    assert cold.read_bytes_per_token > plan.host.slot_bytes
    home = plan_model(MODEL, context=128, **EMULATED)
    options = {"gpu_memory": home.minimum_bytes, "host_memory": home_of_share(home, 0.25)}
    [three_tiers] = run([Preset("fiddler")], **options, **EMULATED).runs
    assert three_tiers.read_bytes_per_token > 0


@pytest.mark.parametrize("options", [{}, EMULATED], ids=["host", "device"])
def test_at_the_least_budget_hits_are_in_slots_that_sequences_lent(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned ones have no residents; what was lent is given back to a long prompt."""
    plan = plan_model(MODEL, context=128, **options)
    least = {"host_memory" if plan.gpu is None else "gpu_memory": plan.minimum_bytes}

    def turn() -> tuple[PresetRun, Account]:
        with LLM(MODEL, context=128, cache="off", **least, **options) as llm:
            assert not any(llm.plan.residents_per_layer)
            [run] = take_turns(llm, [Preset("tide")], Load.of(llm, None, PARAMS), 1)
            return run, account_of(llm.stats())

    run, account = turn()
    slots = account["slots"]
    assert (
        slots["planned"] == plan_model(MODEL, context=128, **least, **options).fast_tier.num_slots
    )
    assert slots["lent"] > 0 and slots["given"] > 0 and 0 < run.hit_rate < 1
    monkeypatch.setattr("lowtide.engine.planning.plan.max_cache_tokens", lambda planner, plan: 0)
    run, account = turn()
    assert run.hit_rate == 0 and "slots" not in account


def test_a_prediction_stands_beside_the_measured_speed(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    [unknown] = run([Preset("tide")]).runs
    assert unknown.predicted is None and unknown.as_dict()["predicted_tokens_per_s"] is None
    result = CliRunner().invoke(app, [*ARGUMENTS, "--policy", "tide"])
    assert "unknown" in result.stdout
    speeds = ModelSpeeds(passes=((1, 1e-3), (99, 1e-2)), reads=((1, 1e-4),))
    opened = open_model(MODEL, EngineConfig(device="cpu", context=128))
    keep_speeds(speed_key(opened.speed_facts, opened.kernels().name), lambda _: speeds)
    [known] = run([Preset("tide")]).runs
    assert known.predicted is not None and known.predicted.least < known.predicted.most
    result = CliRunner().invoke(app, [*ARGUMENTS, "--policy", "tide"])
    assert " to " in result.stdout and "unknown" not in result.stdout


def test_what_cannot_run_here_is_a_row_with_its_reason() -> None:
    least = plan_model(MODEL, context=128, **EMULATED).minimum_bytes
    presets = [Preset("resident"), Preset("lru"), Preset("tide")]
    resident, lru, tide = run(presets, gpu_memory=least, **EMULATED).runs
    assert "too small" in resident.reason and "staging slot" in lru.reason
    assert not lru.turns and "reason" in lru.as_dict()
    assert tide.turns


def test_peak_memory_is_beside_the_plan() -> None:
    [peak] = run([Preset("tide")]).peaks
    assert peak.tier == "process" and peak.planned_bytes > 0
    assert peak.peak_bytes is None or peak.peak_bytes > 0


def test_an_engine_goes_on_under_any_policy() -> None:
    """Beside a device; a host alone is `test_replayed_decisions.py`'s."""
    options: dict[str, Any] = {"context": 128, **EMULATED}
    budget = budget_of_share(plan_model(MODEL, **options), 0.4)
    with LLM(MODEL, device="cpu", context=128) as llm:
        [wanted] = llm.generate([[5, 6, 7]], PARAMS)
    assert wanted.usage.receipt is None  # no policy that changes words
    with LLM(MODEL, gpu_memory=budget, **options) as llm:
        for policy in sorted(set(preset_names()) - {"resident"}):
            llm.adopt_policy(policy, {"miss": "wait"} if policy == "buddymoe" else {})
            [found] = llm.generate([[5, 6, 7]], PARAMS)
            assert found.token_ids == wanted.token_ids, policy
            assert llm.plan.policy == policy or policy == "auto"
        with pytest.raises(UsageError, match="too small"):
            llm.adopt_policy("resident")
        with pytest.raises(UsageError, match="no option"):
            llm.adopt_policy("lru", {"tau": "2"})
        assert llm.generate([[5, 6, 7]], PARAMS)[0].token_ids == wanted.token_ids


def test_budgets_hold_their_share() -> None:
    for options in ({}, EMULATED):
        plan = plan_model(MODEL, context=128, **options)
        budget = "host_memory" if plan.gpu is None else "gpu_memory"
        assert budget_of_share(plan, 1.0) == plan.full_bytes
        for share in (0.0, 0.25, 0.5):
            chosen = plan_model(
                MODEL, context=128, **{budget: budget_of_share(plan, share)}, **options
            )
            assert sum(chosen.residents_per_layer) == round(share * plan.num_experts)
    half = plan_model(MODEL, context=128, host_memory=home_of_share(plan, 0.5), **EMULATED)
    assert sum(half.host_residents_per_layer) == plan.num_experts // 2
    with pytest.raises(PlanError):
        plan_model(MODEL, context=128, host_memory=home_of_share(plan, 0.0) - 1, **EMULATED)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command without the seconds that ceilings take."""
    ceilings = Ceilings(this_machine(), (Rate("memory copy", "B", 1e10, 0.1, 1e10),), ())
    monkeypatch.setattr(bench_module, "measure_ceilings", lambda model, **options: ceilings)


ARGUMENTS = ["bench", str(MODEL), "--context", "128", "--max-tokens", "8", "--repeats", "1"]


def test_the_command_prints_one_object(quick: None) -> None:
    options = ["--device", "emulated", "--device-option", "link_GBps=100", "--policy", "tide,lru"]
    result = CliRunner().invoke(app, [*ARGUMENTS, *options, "--policy-option", "tau=2", "--json"])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["is_emulated"] and "emulated" in found["device"]
    assert [one["preset"] for one in found["runs"]] == ["tide", "lru"]
    assert [one["policy_options"] for one in found["runs"]] == [{"tau": "2"}, {}]
    assert found["ceilings"][0]["per_s"] == 1e10
    assert found["max_tokens"] == 8 and found["version"]


def test_the_command_says_what_there_was_to_decide(quick: None) -> None:
    result = CliRunner().invoke(app, [*ARGUMENTS, "--policy", "tide,resident"])
    assert result.exit_code == 0, result.stderr
    for words in (
        "policies differ only",
        "resident cannot run",
        "No budget was given",
        "memory copy",
    ):
        assert words in result.stdout
    nothing = CliRunner().invoke(app, [*ARGUMENTS, "--policy", "resident"])
    assert nothing.exit_code == 1 and "resident cannot run" in nothing.stdout
    assert nothing.stdout.startswith(f"{MODEL} cannot run like this.")
    assert result.stdout.startswith(f"{MODEL} writes ")
    emulated = CliRunner().invoke(app, [*ARGUMENTS, "--device", "emulated", "--policy", "tide"])
    assert "The device is emulated" in emulated.stdout
    assert "policies differ only" not in emulated.stdout


@pytest.mark.parametrize(
    ("context", "options", "found"),
    [
        ("64", [], (32, 32)),
        ("64", ["--max-tokens", "56"], (8, 56)),
        ("2", [], (1, 1)),
        ("256", [], (40, 64)),
    ],
)
def test_prompt_and_answer_share_a_small_context(
    context: str, options: list[str], found: tuple[int, int], tmp_path: Path, quick: None
) -> None:
    """Both are the bench's own choice where nobody asks for them."""
    CliRunner().invoke(app, ["synth", "olmoe", "--out", str(tmp_path / "it")])
    arguments = [
        "bench",
        str(tmp_path / "it"),
        "--context",
        context,
        "--repeats",
        "1",
        *options,
        "--json",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert (told["prompt_tokens"], told["max_tokens"]) == found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--policy", "tide,nonsense"], "'nonsense' is not known"),
        (["--policy", "tide,tide"], "twice"),
        (["--policy", "tide,"], "a name is missing"),
        (["--policy", "lru", "--policy-option", "tau=1"], "option 'tau'"),
        (["--stop", "x"], "--stop"),
        (["--max-tokens", "128"], "1 prompt tokens and 128 new ones need"),
    ],
)
def test_wrong_wishes_are_refused_before_anything_is_loaded(
    options: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(bench_module, "measure_ceilings")
    result = CliRunner().invoke(app, [*ARGUMENTS, *options])
    assert result.exit_code in (1, 2)
    assert words in result.stderr


def test_a_label_has_the_options() -> None:
    assert PresetRun(Preset("tide", {"tau": "1"})).preset.label == "tide tau=1"
