"""Faults of the machine under a server.

A request that meets one fails in its API's form, the next is answered, and `/health` tells the
truth.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from apis import told_failure
from serving import LIMIT_S, Running, serving, talking_folder
from test_serve_gone import BODIES
from whole import budget_bytes

from lowtide import AsyncLLM
from lowtide.decode.batch_decoder import BatchDecoder
from lowtide.decode.request import Event, Request
from lowtide.engine.running import worker
from lowtide.engine.running.engine import Engine
from lowtide.errors import DeviceError, PageError, StorageError, UsageError
from lowtide.serve import service
from lowtide.serve.settings import ServeSettings

CONTEXT = 256


def opened(folder: Path) -> AsyncLLM:
    """With as little memory as there can be: every pass reads experts."""
    least = budget_bytes(folder, 0.0, context=CONTEXT)
    return AsyncLLM(folder, context=CONTEXT, policy="lru", host_memory=least)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    llm = opened(talking_folder(tmp_path_factory.mktemp("faults") / "model"))
    with serving(llm) as server:
        yield server
    asyncio.run(llm.close())


def ids_of(client: httpx.Client) -> list[int]:
    """Of a short answer that is always the same."""
    body = {"prompt": "def", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    answer = client.post("/v1/completions", json={**body, "return_token_ids": True})
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


SCHEMA = {"type": "object"}
OF_SCHEMA = {"type": "json_schema", "schema": SCHEMA}
FORMED: Mapping[str, Mapping[str, object]] = {
    "/v1/chat/completions": {"structured_outputs": {"json": SCHEMA}},
    "/v1/responses": {"text": {"format": {**OF_SCHEMA, "name": "answer"}}},
    "/v1/messages": {"output_config": {"format": OF_SCHEMA}},
    "/api/chat": {"format": SCHEMA},
    "/api/generate": {"format": SCHEMA},
}
"""What makes a request's answer keep to a form, whose grammar is compiled first; completions have
none."""


@contextmanager
def begun_stream(client: httpx.Client, path: str) -> Iterator[httpx.Response]:
    """A formed answer whose headers are there, with a status that is no refusal."""
    body = {**BODIES[path], **FORMED[path], "stream": True}
    with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        yield answer


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (StorageError("Sector 7 cannot be read."), "Sector 7 cannot be read."),
        (DeviceError("The GPU has not ended its work."), "The GPU has not ended its work."),
        (PageError("The system refuses a page."), "The system refuses a page."),
        (MemoryError(), "The server failed on this request."),
    ],
)
def test_a_pass_that_fails_ends_its_request_alone(
    running: Running,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    message: str,
    stream: bool,
) -> None:
    run_pass, passes_left = worker.run_pass, -1

    def failing(engine: Engine, decoder: BatchDecoder[Any]) -> list[Event]:
        nonlocal passes_left
        passes_left -= 1
        if passes_left == -1:
            raise error
        return run_pass(engine, decoder)

    monkeypatch.setattr(worker, "run_pass", failing)
    with running.client() as client:
        expected = ids_of(client)
        for path, body in BODIES.items():
            passes_left = 1
            answer = client.post(path, json={**body, "stream": stream})
            assert answer.status_code == (200 if stream else 500)
            assert told_failure(path, answer.text) == message
            assert client.get("/health").status_code == 200
            assert ids_of(client) == expected


@pytest.mark.parametrize("stream", [True, False])
def test_an_echo_that_takes_too_long_ends_as_an_answer_does(
    running: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async def prompt_logprobs(*_: object) -> list[None]:
        await asyncio.Event().wait()
        return []

    settings = ServeSettings()
    object.__setattr__(settings, "request_timeout_s", 0.01)
    monkeypatch.setattr(running.service, "settings", settings)
    monkeypatch.setattr(running.service.llm, "prompt_logprobs", prompt_logprobs)
    body = {"prompt": "def", "max_tokens": 1, "echo": True, "logprobs": 1, "stream": stream}
    with running.client() as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == (200 if stream else 504)
    assert "--request-timeout" in told_failure("/v1/completions", answer.text)


@pytest.mark.parametrize("path", FORMED)
def test_a_stream_begins_though_its_form_is_not_compiled(
    running: Running, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A refusal of the form comes in the stream then; a whole answer has its status as ever."""
    has_begun = threading.Event()

    def refused(*_: object, **__: object) -> list[Request]:
        assert has_begun.wait(LIMIT_S)
        raise UsageError("The form cannot be kept to.")

    monkeypatch.setattr(running.service.llm, "requests", refused)
    monkeypatch.setattr(service, "PING_S", 0.0)
    with running.client() as client:
        with begun_stream(client, path) as answer:
            has_begun.set()
            answer.read()
        assert "The form cannot be kept to." in answer.text.strip().split("\n")[-1]
        whole = client.post(path, json={**BODIES[path], **FORMED[path], "stream": False})
        assert whole.status_code == 400 and "The form cannot be kept to." in whole.text


@pytest.mark.parametrize("path", FORMED)
def test_a_stream_whose_form_takes_too_long_is_out_of_time(
    running: Running, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    may_end = threading.Event()
    in_short = replace(running.service.settings, request_timeout_s=1)
    monkeypatch.setattr(running.service, "settings", in_short)
    monkeypatch.setattr(running.service.llm, "requests", lambda *_, **__: may_end.wait(LIMIT_S))
    monkeypatch.setattr(service, "PING_S", 0.0)
    with running.client() as client:
        with begun_stream(client, path) as answer:
            answer.read()
        may_end.set()
    assert "--request-timeout" in answer.text.strip().split("\n")[-1]
