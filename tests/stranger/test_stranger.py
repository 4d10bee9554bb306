"""Promises to those who add something, held from a distribution of its own with entry points.

A process of its own imports it, and it uses the names of `lowtide.extend` alone.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from programs import python

import lowtide.extend

HERE = Path(__file__).parent
SITE = HERE / "site"
ASKED = ("demo:autoregressive", "Sort 93 21 57 40 12", "--context", "256", "--json")

POLICY_FILE = """
import numpy as np
from lowtide.extend import Placement, Ranks, Recipe, register_policy

class Nobody(Placement):
    def begin_pass(self, step, num_residents, capacity):
        return Ranks(np.zeros((len(capacity), self.num_experts)), capacity)

    def __init__(self, inputs):
        super().__init__(inputs.num_layers, inputs.num_experts)
        self.num_experts = inputs.num_experts

register_policy("nobody", Recipe(Nobody))
"""


def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """The command line beside the stranger's distribution."""
    path = os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = python("-m", "lowtide", *arguments, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture(scope="module")
def expected() -> str:
    return str(json.loads(run("generate", *ASKED, "--policy", "lru").stdout)["text"])


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(POLICY_FILE)
    return path


def test_the_stranger_imports_promised_names_alone() -> None:
    for path in (SITE / "stranger").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lowtide"):
                assert node.module == "lowtide.extend"
                assert {alias.name for alias in node.names} <= set(lowtide.extend.__all__)


def test_every_promised_name_is_there() -> None:
    homes = vars(lowtide.extend)["_HOMES"]
    assert sorted(homes) == sorted(lowtide.extend.__all__)
    assert all(getattr(lowtide.extend, name) is not None for name in lowtide.extend.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        getattr(lowtide.extend, "Nothing")  # noqa: B009


def test_a_policy_of_a_distribution_runs_and_changes_no_word(expected: str) -> None:
    told = run(
        *("generate", *ASKED, "--policy", "newest", "--policy-option", "gain=3"),
        *("--host-memory", "6MiB"),
    )
    answer = json.loads(told.stdout)
    assert answer["text"] == expected and answer["plan"]["policy"] == "newest"
    refused = run("generate", *ASKED, "--policy", "newest", "--policy-option", "gain=x", code=2)
    assert "gain must be a whole number from 1 to 9" in refused.stdout


@pytest.mark.parametrize(
    "name, said", [("broken", "cannot be imported from stranger.nowhere"), ("wrong", "Recipe")]
)
def test_a_distribution_that_is_broken_is_named(name: str, said: str) -> None:
    refused = run("generate", *ASKED, "--policy", name, code=2)
    assert said in json.loads(refused.stdout)["error"]["message"]


def test_a_device_of_a_distribution_computes_the_same_words(expected: str) -> None:
    told = run("generate", *ASKED, "--device", "second-host", "--gpu-memory", "5MiB")
    answer = json.loads(told.stdout)
    assert answer["text"] == expected and answer["plan"]["device"] == "second-host"
    refused = run("generate", *ASKED, "--device", "third-host", code=2)
    assert "second-host" in json.loads(refused.stdout)["error"]["message"]


def test_a_verb_of_a_distribution_is_listed_without_being_imported() -> None:
    listed = run("--help")
    assert re.search(r"greet +Say hello to somebody\.", listed.stdout)
    assert "imported" not in listed.stderr
    assert run("greet", "Ada").stdout == "Hello, Ada.\n"


def test_a_policy_in_a_file_runs_in_generate_and_simulate(
    policy_file: Path, tmp_path: Path, expected: str
) -> None:
    trace, mine = str(tmp_path / "trace"), ("--policy-file", str(policy_file))
    told = run("generate", *ASKED, *mine, "--policy", "nobody", "--trace", trace)
    assert json.loads(told.stdout)["text"] == expected
    told = run("simulate", trace, *mine, "--policy", "nobody,lru", "--json")
    assert [each["preset"] for each in json.loads(told.stdout)["runs"]] == ["nobody", "lru"]


@pytest.mark.parametrize(
    "text, said, code",
    [
        (None, "there is no such file", 1),
        ("1 / 0", "ends with ZeroDivisionError", 2),
        ("def", "ends with SyntaxError", 2),
        ("", "registers no new policy", 2),
    ],
)
def test_a_file_that_does_not_work_is_refused(
    text: str | None, said: str, code: int, tmp_path: Path
) -> None:
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    refused = run(
        "plan",
        "demo:diffusion",
        "--policy-file",
        str(path),
        "--policy",
        "nobody",
        "--json",
        code=code,
    )
    assert said in json.loads(refused.stdout)["error"]["message"]


def test_a_recipe_is_given_to_python_as_it_is() -> None:
    code = """
from stranger.policies import NEWEST
from lowtide import LLM, plan_model
options = {"context": 256, "host_memory": "6MiB"}
print(plan_model("demo:autoregressive", policy=NEWEST, **options).policy)
with LLM("demo:autoregressive", policy=NEWEST, policy_options={"gain": "2"}, **options) as llm:
    first = llm.generate("Sort 93 21 57 40 12")[0].text
    llm.adopt_policy("lru")
    assert llm.generate("Sort 93 21 57 40 12")[0].text == first
    llm.adopt_policy(NEWEST)
    print(llm.plan.policy)
"""
    done = python("-c", code, env={**os.environ, "PYTHONPATH": str(SITE)})
    assert done.stdout.split() == ["recipe-1", "recipe-1"], done.stderr


def test_a_recipe_without_a_name_is_known_as_long_as_it_is_in_use() -> None:
    """It is listed nowhere, and its name is another's afterwards."""
    code = """
import gc
from dataclasses import replace
from stranger.policies import NEWEST
from lowtide import LLM, plan_model
from lowtide.errors import UsageError
from lowtide.policies.presets import preset_names
options = {"context": 256, "host_memory": "6MiB"}
before = preset_names()
for _ in range(2):
    with LLM("demo:autoregressive", policy=replace(NEWEST), **options) as llm:
        gc.collect()
        assert preset_names() == before
        llm.generate("Sort 93 21 57 40 12")
        print(llm.plan.policy)
        llm.adopt_policy(replace(NEWEST))
        gc.collect()
        llm.generate("Sort 93 21 57 40 12")
        print(llm.plan.policy)
    del llm
    gc.collect()
    for name in ("recipe-1", "recipe-2"):
        try:
            plan_model("demo:autoregressive", policy=name, **options)
        except UsageError:
            continue
        raise SystemExit(f"{name} is known still")
"""
    done = python("-c", code, env={**os.environ, "PYTHONPATH": str(SITE)})
    assert done.stdout.split() == ["recipe-1", "recipe-2"] * 2, done.stderr
