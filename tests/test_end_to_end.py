"""From a command line to words: the program as a user runs it, in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from programs import python

import lowtide
from lowtide.model_writing.synth import synth

DEMO = Path(lowtide.__file__).parent / "demo" / "autoregressive"
PLAN_KEYS = {"minimum_bytes", "full_bytes", "budget_bytes", "overhead_bytes", "tiers", "reason"}
PART_KEYS = {"dense_bytes", "kv_cache_bytes", "workspace_bytes", "ring_bytes", "slot_bytes"}


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {n: v for n, v in os.environ.items() if not n.startswith("LOWTIDE_")}
    result = python("-m", "lowtide", *arguments, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    return result


def one_object(text: str) -> dict[str, Any]:
    """The one JSON object that is all of `text`."""

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    value = json.loads(text, parse_constant=no_constant)
    assert isinstance(value, dict)
    return value


def check_plan(plan: dict[str, Any]) -> None:
    assert plan.keys() >= PLAN_KEYS
    host = plan["tiers"]["host"]
    assert host.keys() >= PART_KEYS
    assert 0 < plan["minimum_bytes"] <= plan["full_bytes"]
    assert plan["minimum_bytes"] <= plan["budget_bytes"] == host["budget_bytes"]
    parts = ("dense_bytes", "kv_cache_bytes", "workspace_bytes", "ring_bytes")
    used = sum(host[part] for part in parts) + host["slot_bytes"] * host["num_slots"]
    assert used == host["used_bytes"] <= host["budget_bytes"]
    assert plan["overhead_bytes"] > 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(synth("llada2", "tiny", tmp_path_factory.mktemp("end_to_end") / "m"))


def test_half_the_model_in_memory_writes_the_same_words(model: str) -> None:
    plan = one_object(program("plan", model, "--json").stdout)
    check_plan(plan)
    half = plan["minimum_bytes"] + (plan["full_bytes"] - plan["minimum_bytes"]) // 2
    asked = ["generate", model, "--prompt-ids", "5 17 3", "--max-tokens", "64", "--json"]
    result = program(*asked, "--host-memory", str(half), "--policy", "tide")
    answer = one_object(result.stdout)
    assert answer.keys() >= {"token_ids", "text", "finish_reason", "usage", "stats", "plan"}
    assert len(answer["token_ids"]) == 64
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 64
    assert answer["stats"]["num_misses"] > 0
    check_plan(answer["plan"])
    assert answer["plan"]["budget_bytes"] == half
    assert answer["plan"]["policy"] == "tide"

    everything = one_object(program(*asked, "--policy", "resident").stdout)
    assert everything["token_ids"] == answer["token_ids"]
    assert everything["text"] == answer["text"]
    assert everything["stats"]["num_misses"] == 0


def test_the_demo_answers_in_less_memory_than_it_has_weights() -> None:
    budget = 6 << 20
    assert budget < sum(path.stat().st_size for path in DEMO.glob("*.safetensors"))
    asked = ["generate", "demo:autoregressive", "Sort 93 21 57", "--json", "--context", "512"]
    answer = one_object(program(*asked, "--host-memory", str(budget)).stdout)
    assert answer["plan"]["policy"] == "lowtide"
    assert answer["text"] == "21 57 93"
    assert answer["finish_reason"] == "stop"
