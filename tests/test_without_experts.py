"""A model without experts: nothing to place, and everything else as for any other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import loop_of
from test_toy_family import CONFIG, FAMILY
from typer.testing import CliRunner

from lowtide.cli.app import app
from lowtide.core import Step, StepKind
from lowtide.doctor import doctor
from lowtide.doctor.doctor import diagnose
from lowtide.errors import PlanError, UnsupportedError, UsageError
from lowtide.experts.rows import Routing
from lowtide.families import SynthSize, read_config, register, unregister
from lowtide.hardware.machine import this_machine
from lowtide.lab import bench as bench_module
from lowtide.lab.bench import Ceilings, Preset, bench
from lowtide.lab.calibrate import calibrate
from lowtide.lab.verify import verify
from lowtide.llm import LLM, plan_model
from lowtide.model_writing.synth import write_checkpoint
from lowtide.params import SamplingParams
from lowtide.record import recorded
from lowtide.schemas import model_schema

DENSE = {**CONFIG, "num_toys": 0}
CONTEXT = 128
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    register(FAMILY)
    folder = tmp_path_factory.mktemp("dense") / "model"
    yield write_checkpoint(SynthSize(DENSE, 304, 1 << 20), folder)
    unregister("toy")


def test_its_plan_has_no_slots(folder: Path, tmp_path: Path) -> None:
    config = read_config(DENSE)
    assert config.experts is None and len(config.moe_layers) == 0
    assert config.num_leading_layers == 1
    found = model_schema(config)
    assert found.storages == () and found.expert_elements == 0
    assert "model.layers.2.mlp.gate_proj.weight" in {spec.name for spec in found.dense}
    plan = plan_model(folder, context=CONTEXT)
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    assert plan_model(tmp_path, context=CONTEXT) == plan
    assert plan.minimum_bytes == plan.full_bytes == plan.host.used_bytes
    assert (plan.policy, plan.num_experts, plan.residents_per_layer) == ("none", 0, ())
    with pytest.raises(PlanError, match="is too small"):
        plan_model(folder, context=CONTEXT, host_memory=plan.minimum_bytes - 1)


def test_it_answers_within_its_plan(folder: Path) -> None:
    plan, prompt = plan_model(folder, context=CONTEXT), list(range(1, 30))
    with LLM(folder, context=CONTEXT, host_memory=plan.minimum_bytes) as llm:
        token_ids = llm.generate(prompt, PARAMS)[0].token_ids
        logits = llm.logits(prompt + token_ids)
        stats = llm.stats()
    assert logits[len(prompt) - 1 : -1].argmax(1).tolist() == token_ids
    assert stats["forwards"] and not stats["num_hits"] and not stats["read_bytes"]
    assert llm.routers == [] and llm.device == ""


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"policy": "tide"}, UsageError, "nothing to place"),
        ({"policy_options": {"tau": "3"}}, UsageError, "nothing to place"),
        ({"calibration": "some.file"}, UsageError, "`calibration`: ToyForCausalLM has no experts"),
        ({"expert_dtype": "bfloat16"}, UsageError, "`expert_dtype`: ToyForCausalLM has no experts"),
        ({"device": "emulated"}, UnsupportedError, "`device` .emulated. computes experts"),
    ],
    ids=str,
)
def test_options_about_experts_are_refused(
    folder: Path, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        plan_model(folder, **options)


def test_what_a_sequence_has_held_goes_back_to_the_system(folder: Path) -> None:
    prompt = list(range(1, 30))
    with LLM(folder, context=CONTEXT) as llm:
        expected = llm.generate(prompt, PARAMS)[0].token_ids
    with LLM(folder, context=CONTEXT, cache="off") as llm:
        assert llm.generate(prompt, PARAMS)[0].token_ids == expected
        pages = loop_of(llm).look(lambda engine: engine.kv_cache.pages)
        assert pages is not None and pages.committed_bytes == 0


def test_what_is_about_experts_is_refused(folder: Path, tmp_path: Path) -> None:
    x, step = torch.zeros(1, 64, dtype=torch.bfloat16), Step(StepKind.DECODE, 0)
    routing = Routing(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2))
    with LLM(folder, context=CONTEXT) as llm:
        with pytest.raises(UnsupportedError, match="run_experts: ToyForCausalLM has no experts"):
            llm.run_experts(0, x, routing, step)
        with pytest.raises(UnsupportedError, match="A calibration is of experts"):
            calibrate(llm, list(range(100)), "toy")
        with pytest.raises(UnsupportedError, match="A trace is of experts"):
            with recorded(llm, tmp_path / "trace", "toy"):
                pass
        with pytest.raises(UsageError, match="nothing to place"):
            llm.adopt_policy("lru")
        llm.adopt_policy("auto")
        assert len(llm.generate([1, 2], SamplingParams(max_tokens=3))[0].token_ids) == 3


def test_verify_has_one_budget(folder: Path) -> None:
    [verdict] = verify(folder, max_tokens=8, device="cpu", context=CONTEXT)
    assert verdict.is_same and verdict.first_token is None and not verdict.num_residents
    assert verdict.budget_bytes == plan_model(folder, context=CONTEXT).minimum_bytes


def test_bench_has_one_policy(folder: Path) -> None:
    presets = [Preset("auto"), Preset("lru")]
    options = {"device": "cpu", "context": CONTEXT}
    result = bench(folder, presets, None, PARAMS, repeats=1, **options)
    found, refused = result.runs
    assert found.policy == "none" and found.tokens_per_s.median > 0
    assert not found.read_bytes_per_token and "nothing to place" in refused.reason
    assert found.as_dict()["num_tokens"] == 24


def test_doctor_says_that_there_is_nothing_to_measure(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "machine_rates", lambda *_, **__: [])
    diagnosis = diagnose(folder, name="toy", device="cpu")
    assert diagnosis.costs == () and diagnosis.skipped == (("toy", "it has no experts"),)


def test_the_command_line_shows_no_slots(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ceilings = Ceilings(this_machine(), (), ())  # they take seconds
    monkeypatch.setattr(bench_module, "measure_ceilings", lambda model, **options: ceilings)

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, [*arguments, "--context", str(CONTEXT)])

    shown = run("plan", str(folder))
    assert shown.exit_code == 0 and "slots" not in shown.output
    assert "there is nothing to place" in shown.output
    plan = json.loads(run("plan", str(folder), "--json").stdout)
    assert plan["policy"] == "none" and plan["tiers"]["host"]["num_slots"] == 0
    assert "experts resident" not in shown.output
    asked = ("generate", str(folder), "--prompt-ids", "1 2 3", "--max-tokens", "4")
    assert "hit rate" not in run(*asked).output
    for verb in (("verify",), ("bench", "--repeats", "1", "--max-tokens", "4")):
        found = run(verb[0], str(folder), *verb[1:])
        assert found.exit_code == 0 and "hits" not in found.output
        assert "resident experts" not in found.output
        told = json.loads(run(verb[0], str(folder), *verb[1:], "--json").stdout)
        assert {row["hit_rate"] for row in told["runs"]} == {None}
    chat = ["chat", str(folder), "--raw", "--max-tokens", "4"]
    chatted = CliRunner().invoke(app, chat, input="hi\n/stats\n")
    assert " passes" in chatted.output and "hits" not in chatted.output
    answer = json.loads(run(*asked, "--json").stdout)
    assert answer["token_ids"] and answer["stats"]["hit_rate"] is None
    traced = run(*asked, "--trace", "x")
    assert traced.exit_code == 2 and "A trace is of experts" in traced.output
