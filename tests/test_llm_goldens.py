"""The whole engine against the original implementation's recorded outputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import intake_of
from safetensors.torch import load_file
from whole import SETTINGS, Setting, answers, check_idle, routing_noted, trajectories_noted

from lowtide import DiffusionParams, SamplingParams
from lowtide.decode.request import Request
from lowtide.llm import LLM

GOLDENS = Path(__file__).parent / "goldens"
NAMES = ["llada2-a", "llada2-b-bf16"]
TOLERANCE = 2e-4
LEAST, MIDDLE, FULL = Setting("tide", 0.0), Setting("lru", 0.5), Setting("resident", 1.0)

Case = dict[str, Any]


def cases_of(name: str) -> list[Case]:
    return json.loads((GOLDENS / name / "generate.json").read_text())["cases"]


def open_golden(name: str, setting: Setting, **options: Any) -> LLM:
    # Stored in bfloat16 or not, the reference computed in float32.
    return setting.open(GOLDENS / name, dtype="float32", **options)


def params_of(case: Case) -> SamplingParams:
    names = ("block_length", "steps", "threshold", "eos_early_stop")
    diffusion = DiffusionParams(**{name: case["params"][name] for name in names})
    return SamplingParams(max_tokens=case["params"]["gen_length"], diffusion=diffusion)


def requests_of(llm: LLM, cases: Sequence[Case]) -> list[Request]:
    requests = []
    for index, case in enumerate(cases):
        [request] = intake_of(llm).requests([case["prompt"]], params_of(case))
        eos = (case["params"]["eos_id"],)
        requests.append(replace(request, id=index, eos_token_ids=eos))
    return requests


def ends_of(case: Case) -> str:
    """Why an answer ends."""
    return "stop" if case["output"][-1] == case["params"]["eos_id"] else "length"


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_router_choices(name: str, setting: Setting) -> None:
    golden = load_file(GOLDENS / name / "forward.safetensors")
    with open_golden(name, setting, block_length=8) as llm:
        for sequence, token_ids in enumerate(golden["input_ids"].tolist()):
            with routing_noted(llm) as routing:
                logits = llm.logits(token_ids)
            expected = golden["logits"][sequence]
            torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
            for layer in range(llm.config.num_moe_layers):
                [chosen] = routing[layer]
                expected = golden[f"topk_idx.{layer}"][sequence].sort().values
                assert torch.equal(chosen, expected)
        check_idle(llm)


def check_passes(case: Case, rows: list[list[int]], num_forwards: int) -> None:
    """Assert that the passes are those of the published decoder.

    Where the end of the text ends them, there are no more than those: the published one looks for
    an end in a pass that writes one, and may then go on behind an earlier one.
    """
    assert rows == case["trajectory"][: len(rows)] and len(rows) == num_forwards
    missing = case["forwards"] - num_forwards
    assert missing >= 0 if case["params"]["eos_early_stop"] else missing == 0


def check_batch(llm: LLM, cases: Sequence[Case]) -> None:
    finished, trajectories = answers(llm, requests_of(llm, cases))
    for index, case in enumerate(cases):
        check_passes(case, trajectories[index], finished[index].num_forwards)
        assert list(finished[index].token_ids) == case["output"]
        assert finished[index].finish_reason == ends_of(case)
    check_idle(llm)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_all_cases_as_one_batch(name: str, setting: Setting) -> None:
    with open_golden(name, setting) as llm:
        check_batch(llm, cases_of(name))


@pytest.mark.parametrize("setting", [LEAST, FULL], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_all_cases_as_one_batch_recomputed(name: str, setting: Setting) -> None:
    with open_golden(name, setting, kv_cache=False) as llm:
        check_batch(llm, cases_of(name))


@pytest.mark.parametrize(
    ("setting", "kv_cache"),
    [(LEAST, True), (MIDDLE, False), (FULL, True)],
    ids=["least", "middle-recomputed", "full"],
)
@pytest.mark.parametrize("name", NAMES)
def test_each_case_alone(name: str, setting: Setting, kv_cache: bool) -> None:
    """Through `generate`, with the end-of-text id as a user would set it."""
    cases = cases_of(name)
    for eos_id in {case["params"]["eos_id"] for case in cases}:
        overrides = {"eos_token_id": eos_id}
        with open_golden(name, setting, kv_cache=kv_cache, config_overrides=overrides) as llm:
            for case in (case for case in cases if case["params"]["eos_id"] == eos_id):
                with trajectories_noted() as trajectories:
                    [completion] = llm.generate(case["prompt"], params_of(case))
                [rows] = trajectories.values()
                check_passes(case, rows, completion.usage.forwards)
                assert completion.token_ids == case["output"]
                assert completion.finish_reason == ends_of(case)
                check_idle(llm)


@pytest.mark.parametrize("name", NAMES)
def test_a_full_cache_lets_requests_wait(name: str) -> None:
    """Room for the longest request only: the batch is decoded one after the other, or nearly."""
    cases = cases_of(name)
    longest = max(len(case["prompt"]) + case["params"]["gen_length"] for case in cases)
    with open_golden(name, LEAST, context=longest) as llm:
        check_batch(llm, cases)
