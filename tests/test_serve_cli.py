"""`lowtide serve`: refusals before anything is loaded, and a process that ends by SIGTERM."""

from __future__ import annotations

import os
import signal
import socket
from functools import partial
from pathlib import Path

import httpx
import pytest
from serving import LIMIT_S, serving_process
from typer.testing import CliRunner, Result

from lowtide.cli import serve as verb
from lowtide.cli.app import app
from lowtide.serve.service import name_of

DEMO = "demo:autoregressive"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["serve", *arguments])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "--api-key"),
        (["--print-config", "emacs"], "codex, claude, continue, open-webui"),
        (["--port", "99999"], "--port must be an integer from 0 to 65535"),
        (["--json"], "/v1/lowtide/plan"),
        (["--host", "no such host"], "cannot listen at no such host"),
        (["--host", "a..b", "--no-auth"], "cannot listen at a..b, port 8000"),
        (["--context", "100000000", "--host-memory", "20MiB"], "context"),
    ],
)
def test_what_cannot_be_served_is_refused(arguments: list[str], said: str) -> None:
    if "no such host" in arguments:
        arguments = [*arguments, "--no-auth"]
    result = run(DEMO, *arguments)
    assert result.exit_code in (1, 2) and said in result.stderr, result.output


def test_a_port_that_is_taken_is_said_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verb, "open_async", None)  # never called
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run(DEMO, "--port", str(taken.getsockname()[1]))
    assert result.exit_code == 2 and "cannot listen at 127.0.0.1" in result.stderr


def test_a_missing_extra_is_said_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verb, "find_spec", lambda name: None if name == "fastapi" else True)
    result = run(DEMO)
    assert result.exit_code == 2
    assert "serve needs fastapi" in result.stderr and "'lowtide[serve]'" in result.stderr


def test_a_folder_s_name_is_text_for_clients(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"m\xff")
    folder.mkdir()
    assert name_of(str(folder)) == "m\ufffd"


def test_a_client_s_config_has_the_context_that_would_be_served() -> None:
    result = run(DEMO, "--print-config", "claude", "--port", "4711", "--host-memory", "64MiB")
    assert result.exit_code == 0, result.output
    assert "export ANTHROPIC_BASE_URL=http://127.0.0.1:4711" in result.stdout
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS=2048" in result.stdout
    assert "The context is 2,048 tokens" in result.stderr
    told = run(DEMO, "--print-config", "open-webui", "--host-memory", "64MiB").stderr
    assert "tokens" not in told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_answers_finish_and_ends_the_process(number: signal.Signals) -> None:
    body = {"prompt": "import", "max_tokens": 150, "ignore_eos": True, "stream": True}
    options = ("--context", "512", "--api-key", "k")
    heard = partial(signal.signal, number, signal.SIG_DFL)  # this test may run under nohup
    with serving_process(DEMO, *options, preexec_fn=heard) as (server, url, said):
        headers = {"authorization": "Bearer k"}
        assert httpx.get(f"{url}/v1/models", timeout=LIMIT_S).status_code == 401
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body, headers=headers, timeout=LIMIT_S
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.send_signal(number)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and len(rest) > 100
        assert server.wait(LIMIT_S) == 128 + number
    told = "".join(said)
    assert "Codex CLI" in told and "Traceback" not in told
    assert "context 512: " in told and "for each token of a conversation" in told
