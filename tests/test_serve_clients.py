"""The clients of agents' APIs and of Ollama's, over the real engine: what Python's API answers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from serving import LIMIT_S, Running, serving, talking_folder

from lowtide import LLM, AsyncLLM, SamplingParams
from lowtide.answers.completion import Completion

CONTEXT = 512
MAX_TOKENS = 24
SYSTEM, USER = "Write Python.", "def fib(n):"
SAID: list[Any] = [{"role": "user", "content": USER}]


@pytest.fixture(scope="module", params=["autoregressive", "diffusion"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_folder(tmp_path_factory.mktemp("clients") / request.param, request.param)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Completion:
    with LLM(folder, context=CONTEXT) as llm:
        messages = [{"role": "system", "content": SYSTEM}, *SAID]
        [answer] = llm.chat(messages, SamplingParams(max_tokens=MAX_TOKENS, temperature=0))
        return answer


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    llm = AsyncLLM(folder, context=CONTEXT, cache="exact")
    with serving(llm) as server:
        yield server
    asyncio.run(llm.close())


def test_ids_are_those_of_python(running: Running, expected: Completion) -> None:
    """In the model's own dtype, to the bit: nothing else shares the passes."""
    body = {
        "messages": [{"role": "system", "content": SYSTEM}, *SAID],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
    }
    with running.client() as client:
        [choice] = client.post("/v1/chat/completions", json=body).json()["choices"]
    assert choice["token_ids"] == expected.token_ids


def test_responses(running: Running, expected: Completion) -> None:
    asked: dict[str, Any] = {
        "model": "gpt-any",
        "instructions": SYSTEM,
        "input": USER,
        "max_output_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    url = f"{running.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=LIMIT_S) as client:
        whole = client.responses.create(**asked)
        events = list(client.responses.create(**asked, stream=True))
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert whole.output_text == expected.text == "".join(texts)
    assert whole.model == running.service.model_name
    assert whole.usage is not None
    assert whole.usage.input_tokens == expected.usage.prompt_tokens
    assert whole.usage.output_tokens == expected.usage.completion_tokens
    assert whole.temperature == 0


def test_messages(running: Running, expected: Completion) -> None:
    asked: dict[str, Any] = {
        "model": "claude-any",
        "system": SYSTEM,
        "messages": [{"role": "user", "content": [{"type": "text", "text": USER}]}],
        "max_tokens": MAX_TOKENS,
        "extra_body": {"temperature": 0},
    }
    with anthropic.Anthropic(
        base_url=running.url, api_key="none", max_retries=0, timeout=LIMIT_S
    ) as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = "".join(stream.text_stream)
        counted = client.messages.count_tokens(
            model="claude-any", system=SYSTEM, messages=asked["messages"]
        )
    [block] = whole.content
    assert block.type == "text" and block.text == streamed == expected.text
    num_prompt = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    assert num_prompt == counted.input_tokens == expected.usage.prompt_tokens


def test_ollama(running: Running, expected: Completion) -> None:
    name = running.service.model_name
    said = [{"role": "system", "content": SYSTEM}, *SAID]
    options = {"num_predict": MAX_TOKENS, "temperature": 0}
    with ollama.Client(host=running.url, timeout=LIMIT_S) as client:
        whole = client.chat(name, said, options=options)
        parts = list(client.chat(name, said, options=options, stream=True))
        generated = client.generate(name, USER, system=SYSTEM, options=options)
        shown = client.show(name)
        assert client.list().models[0].model == client.ps().models[0].model == name
    assert whole.message.content == generated.response == expected.text
    assert "".join(part.message.content or "" for part in parts) == expected.text
    assert whole.prompt_eval_count == expected.usage.prompt_tokens
    assert shown.capabilities is not None and "tools" in shown.capabilities


def test_longer_answers_than_there_is_room_for_are_cut_to_it(running: Running) -> None:
    asked = {"model": "m", "messages": SAID, "max_tokens": 32_000, "temperature": 0}
    with running.client() as client:
        answer = client.post("/v1/messages", json=asked)
        many = {"num_predict": 32_000, "temperature": 0}
        body = {"model": running.service.model_name, "messages": SAID, "options": many}
        lines = client.post("/api/chat", json={**body, "stream": False})
    assert (answer.status_code, lines.status_code) == (200, 200)
    assert 0 < answer.json()["usage"]["output_tokens"] < CONTEXT
    assert 0 < lines.json()["eval_count"] < CONTEXT


def test_forms_that_a_model_can_be_held_to(running: Running) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    format = {"type": "json_schema", "name": "x", "schema": schema}
    with running.client() as client:
        answers: list[httpx.Response] = [
            client.post("/v1/responses", json={"input": USER, "text": {"format": format}}),
            client.post(
                "/api/chat",
                json={
                    "model": running.service.model_name,
                    "messages": SAID,
                    "format": schema,
                    "stream": False,
                },
            ),
            client.post(
                "/v1/messages",
                json={"messages": SAID, "max_tokens": 64, "output_config": {"format": format}},
            ),
            *(
                client.post("/v1/chat/completions", json={"messages": SAID, **asked})
                for asked in (
                    {"structured_outputs": {"json": schema}},
                    {"structured_outputs": {"regex": "[ab]{3}c"}},
                    {"structured_outputs": {"grammar": 'start: "x" "y"'}},
                )
            ),
        ]
    if not running.service.llm.config.decoding.writes_in_order:
        assert [answer.status_code for answer in answers] == [400, 400, 200, 400, 400, 400]
        assert "output_config.format" in answers[2].headers["x-lowtide-ignored"]
        return
    assert [answer.status_code for answer in answers] == [200] * 6
    [item] = answers[0].json()["output"]
    assert json.loads(item["content"][0]["text"]) == {"a": 1}
    texts = [answer.json()["choices"][0]["message"]["content"] for answer in answers[3:]]
    assert json.loads(texts[0]) == {"a": 1} and re.fullmatch("[ab]{3}c", texts[1])
    assert texts[2] == "xy"
