"""What every API of the server promises, against Python's own answers.

The table is `APIS` in `apis.py`. Faults are those that a transfer has: files that cannot be read.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from apis import APIS, check_error, events_of, said, told_failure
from serving import Running, asked, serving, talking_folder
from whole import budget_bytes, wait_until

from lowtide import LLM, AsyncLLM, SamplingParams

CONTEXT = 256
WORDS = {True: "def f(", False: "Sort 93 21 57 40 12"}  # as a prompt; in a chat
MAX_TOKENS = 12

every_api = pytest.mark.parametrize("path", APIS)
whole_and_streamed = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_folder(tmp_path_factory.mktemp("apis") / "model")


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    llm = AsyncLLM(folder, context=CONTEXT, dtype="float32", cache="off")
    with serving(llm, max_requests=1) as found:
        yield found
    asyncio.run(llm.close())


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[bool, str]:
    """Python's answers to `WORDS`."""
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
    with LLM(folder, context=CONTEXT, dtype="float32", cache="off") as llm:
        [raw] = llm.generate(WORDS[True], params, raw=True)
        [chat] = llm.chat(said(WORDS[False]), params)
    assert raw.text and chat.text
    return {True: raw.text, False: chat.text}


@every_api
@whole_and_streamed
def test_an_answer_is_python_s(
    running: Running, expected: dict[bool, str], path: str, stream: bool
) -> None:
    api = APIS[path]
    with running.client() as client:
        answer = client.post(
            path, json={**api.ask(WORDS[api.is_raw], MAX_TOKENS), "stream": stream}
        )
    assert answer.status_code == 200, answer.text
    if stream:
        events = events_of(answer.text)
        assert len([event for event in events if api.text_in(event)]) > 1
        found = "".join(map(api.text_in, events))
    else:
        found = api.text_of(answer.json())
    assert found == expected[api.is_raw]


@every_api
@whole_and_streamed
def test_what_cannot_fit_is_refused_before_it_starts(
    running: Running, path: str, stream: bool
) -> None:
    """In the API's own form, with the numbers."""
    with running.client() as client:
        body = {**APIS[path].ask("word " * CONTEXT, 4), "stream": stream}
        answer = client.post(path, json=body)
    assert answer.status_code == 400
    assert str(CONTEXT) in check_error(path, answer.json())
    assert running.service.is_idle


@every_api
def test_a_client_that_goes_frees_its_place(running: Running, path: str) -> None:
    body = {**APIS[path].ask("import", CONTEXT - 100), "stream": True}
    with asked(running.url, path, **body) as client:
        assert client.recv(1)  # its answer has begun
    wait_until(lambda: running.service.is_idle)
    with running.client() as client:
        again = client.post(path, json={**APIS[path].ask("a", 1), "stream": False})
    assert again.status_code == 200


@pytest.fixture(scope="module")
def torn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose experts' files are cut, once it has answered."""
    folder = talking_folder(tmp_path_factory.mktemp("torn") / "model")
    least = budget_bytes(folder, 0.0, context=CONTEXT)
    llm = AsyncLLM(folder, context=CONTEXT, policy="lru", host_memory=least)
    with serving(llm) as found, found.client() as client:
        first = client.post("/v1/completions", json=APIS["/v1/completions"].ask("def", 4))
        assert first.status_code == 200
        for file in folder.glob("*.safetensors"):
            os.truncate(file, file.stat().st_size // 2)
        yield found
    asyncio.run(llm.close())


@every_api
@whole_and_streamed
def test_a_read_that_fails_is_an_error_of_its_answer(
    torn: Running, path: str, stream: bool
) -> None:
    body = {**APIS[path].ask("import", 4), "stream": stream}
    with torn.client() as client:
        answer = client.post(path, json=body)
        assert answer.status_code == (200 if stream else 500)
        assert "truncated" in told_failure(path, answer.text)
        assert client.get("/health").status_code == 200
        assert client.get("/v1/lowtide/stats").status_code == 200
