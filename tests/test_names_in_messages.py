"""Messages name an option as the place is called where its user gave it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import httpx
import pytest
from apis import APIS
from scripted_serving import ScriptedService, listening
from typer.testing import CliRunner

from lowtide import LLM
from lowtide.cli.app import app
from lowtide.cli.options import ENGINE_OPTIONS, OPTIONS
from lowtide.engine.opening import device_choice
from lowtide.errors import PlanError, UsageError
from lowtide.llm import plan_model
from lowtide.option import in_words, options_of
from lowtide.params import DiffusionParams, SamplingParams
from lowtide.serve.errors import TooLong

PACKAGE = Path(__file__).parents[1] / "src" / "lowtide"
MODEL = "demo:autoregressive"

SHARED = [*ENGINE_OPTIONS, *options_of(SamplingParams), *options_of(DiffusionParams)]
FLAG = re.compile(rf"(?<![\w-])({'|'.join(re.escape(option.flag) for option in SHARED)})(?![\w-])")
ADVICE = re.compile(r"lowtide \w+|server's|\(--")
"""Before a flag: a command to type, an option of the server, a remark in brackets."""


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_choice, "_has_gpu", lambda: False)


def shown(*arguments: str, **run: object) -> str:
    result = CliRunner().invoke(app, list(arguments), **run)  # type: ignore[arg-type]
    return " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("raise `context` or lower `max_tokens`.", "raise --context or lower `max_tokens`."),
        ('Choose `device="cpu"`, or leave it.', "Choose --device cpu, or leave it."),
        ("run `lowtide calibrate` of `context`.", "run `lowtide calibrate` of --context."),
        ("the context is 4 tokens", "the context is 4 tokens"),
    ],
)
def test_a_name_becomes_the_word_and_all_else_stays(message: str, expected: str) -> None:
    assert in_words(message, {"context": "--context", "device": "--device"}) == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "x", "--max-tokens", "9999"], "Lower --max-tokens."),
        (["generate", "x", "--context", "4"], "or raise --context."),
        (["generate", "x", "--steps", "3"], "--steps is for diffusion models"),
        (["plan", "--gpu-memory", "5G"], "--gpu-memory '5G': there is no GPU in use"),
        (["plan", "--format", "q5"], "--format 'q5' is not known"),
        (["plan", "--device", "cuda"], "Choose --device cpu"),
        (["plan", "--format", "auto", "--expert-dtype", "q4"], "leave --expert-dtype and --dense-"),
        (
            ["plan", "--device-option", "link_GBps=2"],
            "--device-option link_GBps belong to --device",
        ),
        (["plan", "--host-memory", "1K"], "Raise --host-memory"),
        (["serve", "--host", "0.0.0.0"], "--host '0.0.0.0' can be reached from other machines"),
        (["quality", "--setting", "format=q5"], "--setting format 'q5' is not known"),
        (["verify", "--policy", "lru"], "leave --policy and --policy-option out"),
    ],
)
def test_the_command_line_names_flags(arguments: list[str], said: str) -> None:
    verb, *rest = arguments
    message = shown(verb, MODEL, *rest)
    assert said in message and "`" not in message


def test_a_variable_or_a_file_is_named_where_it_gave_the_value(tmp_path: Path) -> None:
    env = {"LOWTIDE_GPU_MEMORY": "5G"}
    assert "LOWTIDE_GPU_MEMORY '5G': there is no GPU" in shown("plan", MODEL, env=env)
    file = tmp_path / "lowtide.toml"
    file.write_text('gpu_memory = "5G"\n')
    said = shown("plan", MODEL, "--config", str(file), env={"COLUMNS": "400"})
    assert f"gpu_memory in {file} '5G': there is no GPU" in said


def test_a_warning_and_a_plan_s_reason_name_flags() -> None:
    message = shown("generate", MODEL, "47 + 85", "--host-memory", "999T", "--top-k", "5")
    assert "--host-memory 999.0 TiB is more than there is" in message
    plan = CliRunner().invoke(app, ["plan", MODEL, "--host-memory", "999T"]).stdout
    assert "--host-memory 999.0 TiB is more" in " ".join(plan.split())


def test_a_conversation_names_its_parameters_and_the_flags_of_its_start() -> None:
    lines = "/set max_tokens 99999\n47 + 85\n/set steps 3\n"
    message = shown("chat", MODEL, "--context", "64", input=lines)
    assert "--max-tokens" not in message and "--steps" not in message
    assert "steps" in message


def test_python_names_keywords() -> None:
    with pytest.raises(UsageError, match="^`gpu_memory` .5G.: there is no GPU in use"):
        plan_model(MODEL, gpu_memory="5G")
    with pytest.raises(PlanError, match="Raise `host_memory`"):
        plan_model(MODEL, host_memory="1KiB")
    with LLM(MODEL, context=64) as llm, pytest.raises(PlanError, match="Lower `max_tokens`"):
        llm.generate("47 + 85", max_tokens=9999)


@pytest.mark.parametrize(
    ("path", "prompt", "length", "form"),
    [
        ("/v1/chat/completions", "messages", "max_tokens", "response_format"),
        ("/v1/completions", "prompt", "max_tokens", "response_format"),
        ("/v1/responses", "input", "max_output_tokens", "text.format"),
        ("/v1/messages", "messages", "max_tokens", "output_config.format"),
        ("/api/chat", "messages", "options.num_predict", "format"),
        ("/api/generate", "prompt", "options.num_predict", "format"),
    ],
)
def test_the_server_names_fields_of_the_path(
    path: str, prompt: str, length: str, form: str
) -> None:
    body = {**APIS[path].ask("import", 4), "model": ScriptedService.model_name}
    refused = UsageError("Lower `max_tokens`, or leave `response_format` out.")
    with listening(ScriptedService([refused])) as url:
        error = httpx.post(url + path, json=body).json()["error"]
    message = error["message"] if isinstance(error, dict) else error
    assert message == f"Lower `{length}`, or leave `{form}` out."
    with listening(ScriptedService([TooLong(50_000, 1, 32_768)])) as url:
        error = httpx.post(url + path, json=body).json()["error"]
    if isinstance(error, dict) and "param" in error:
        assert error["param"] == prompt


def test_no_message_below_the_command_line_has_flags_of_its_own() -> None:
    """Such a flag would reach Python and the server as it is."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0]
        if room in ("cli", "lab"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and node.exc is not None:
                parts = [n.value for n in ast.walk(node.exc) if isinstance(n, ast.Constant)]
                text = "".join(part for part in parts if isinstance(part, str))
                for flag in FLAG.finditer(text):
                    if not ADVICE.search(text[: flag.start() + 2]):
                        found.append((path.name, node.lineno, flag[0]))
    assert not found
    assert len({option.keyword for option in OPTIONS}) == len(OPTIONS)
