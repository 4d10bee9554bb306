"""Requests drawn from the server's OpenAPI document, and whole ones changed at drawn places.

None is a 500, every refusal has its API's form, and none changes another's answer.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Iterator
from functools import reduce
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import schemathesis
from apis import check_error
from examples import examples
from hypothesis import HealthCheck, core, given, note, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import engine
from hypothesis.strategies._internal import collections
from schemathesis.generation.hypothesis import setup
from serving import serving, talking_folder

from lowtide import AsyncLLM
from lowtide.serve.app import build_app
from lowtide.serve.settings import ServeSettings

MODEL = "tiny"
CANARY = {"prompt": "def f(", "max_tokens": 4, "temperature": 0, "return_token_ids": True}

_STAND_IN: Any = SimpleNamespace(settings=ServeSettings(), model_name=MODEL, on_served=[])
DOCUMENT = build_app(_STAND_IN).openapi()
OPERATIONS = [(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods]

_CHANGED = [
    (module, name, getattr(module, name))
    for module, name in (
        (core, "RepresentationPrinter"),
        (core, "BUFFER_SIZE"),
        (engine, "BUFFER_SIZE"),
        (collections, "BUFFER_SIZE"),
    )
]
setup()  # changes these for all property tests of this process: no counterexample would be shown
for _module, _name, _value in _CHANGED:
    setattr(_module, _name, _value)

Check = Callable[[str, str, Any], None]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = talking_folder(tmp_path_factory.mktemp("schema") / "model")
    llm = AsyncLLM(folder, context=1024, dtype="float32", cache="exact")
    limits = {"served_name": MODEL, "max_requests": 16}
    with serving(llm, **limits) as server, server.client() as made:
        yield made
    asyncio.run(llm.close())


@pytest.fixture(scope="module")
def check(client: httpx.Client) -> Check:
    """Asks once; afterwards the canary's ids are what they were at first."""

    def canary() -> list[int]:
        answer = client.post("/v1/completions", json=CANARY)
        return list(answer.json()["choices"][0]["token_ids"])

    first = canary()

    def ask(method: str, path: str, body: Any) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body)
        answer = client.request(method, path, content=content)
        assert answer.status_code < 500 or answer.status_code == 501, answer.text
        assert "The server failed on this request" not in answer.text
        if answer.status_code >= 400 and answer.content:
            check_error(answer.request.url.path, answer.json())
        assert canary() == first

    return ask


def bounded(count: int) -> settings:
    return settings(examples(count), suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def schema() -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_dict(copy.deepcopy(DOCUMENT), config=schemathesis.Config())


def test_the_document_is_openapi(client: httpx.Client, schema: schemathesis.BaseSchema) -> None:
    schema.validate()
    assert client.get("/openapi.json").json() == DOCUMENT
    assert {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"} <= {
        path for path, _ in OPERATIONS
    }


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_what_is_drawn_from_the_document(
    check: Check, schema: schemathesis.BaseSchema, path: str, method: str
) -> None:
    operation = schema[path][method]
    modes = list(schemathesis.GenerationMode) if operation.body else [None]
    cases = [operation.as_strategy(*([mode] if mode else [])) for mode in modes]

    @bounded(20)
    @given(st.one_of(cases))
    def ask(case: schemathesis.Case) -> None:
        body = b"" if case.body is schemathesis.core.NOT_SET else case.body
        note(f"{case.method} {case.formatted_path} {body!r}")
        check(case.method, case.formatted_path, body)

    ask()


# Whole requests, changed at drawn places

TOOL: dict[str, Any] = {
    "name": "weather",
    "description": "How the weather is.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": ["integer", "null"]}},
        "required": ["city"],
    },
    "strict": False,
}
CALLED = '{"city": "Bern"}'
DRAWS: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 1, "stream": True}
MORE = {"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}

CHAT = {
    "model": MODEL,
    "messages": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "47 + 85"}], "name": "me"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": CALLED},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ],
    "tools": [{"type": "function", "function": TOOL}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "response_format": {"type": "text"},
    "reasoning_effort": "low",
    "chat_template_kwargs": {"enable_thinking": False},
    "max_completion_tokens": 4,
    "stop": ["\n"],
    "n": 2,
    "logprobs": True,
    "top_logprobs": 2,
    "stream_options": {"include_usage": True},
    **DRAWS,
    **MORE,
}
COMPLETION = {
    "model": MODEL,
    "prompt": [[5, 6, 7], [8]],
    "echo": True,
    "logprobs": 1,
    "max_tokens": 2,
    "stop": "\n",
    **DRAWS,
    **MORE,
}
RESPONSE = {
    "model": MODEL,
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "47 + 85"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "lowtide:aG0="},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": CALLED},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
        {"type": "custom_tool_call", "call_id": "call_2", "name": "patch", "input": "x"},
        {
            "type": "custom_tool_call_output",
            "call_id": "call_2",
            "output": [{"type": "input_text", "text": "done"}],
        },
    ],
    "tools": [
        {"type": "function", **TOOL},
        {"type": "custom", "name": "patch", "format": {"type": "text"}},
        {"type": "namespace", "name": "other", "tools": [{"type": "function", "name": "wait"}]},
        {"type": "web_search"},
    ],
    "tool_choice": {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "weather"}, {"type": "custom", "name": "patch"}],
    },
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "max_output_tokens": 4,
    "metadata": {"a": "b"},
    **DRAWS,
}
MESSAGE = {
    "model": MODEL,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "47 + 85"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Bern"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "call_1",
                    "content": [{"type": "text", "text": "rain"}],
                }
            ],
        },
    ],
    "tools": [{"name": "weather", "description": "", "input_schema": TOOL["parameters"]}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "adaptive", "display": "omitted"},
    "output_config": {"effort": "low"},
    "context_management": {"edits": []},
    "stop_sequences": ["\n"],
    "max_tokens": 4,
    **DRAWS,
}
OLLAMA_CHAT = {
    "model": MODEL,
    "messages": [
        {"role": "user", "content": "47 + 85"},
        {
            "role": "assistant",
            "content": "",
            "thinking": "hm",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Bern"}}}],
        },
        {"role": "tool", "tool_name": "weather", "content": "rain"},
    ],
    "tools": [{"type": "function", "function": TOOL}],
    "options": {"num_predict": 4, "num_ctx": 8192, "stop": ["\n"], "repeat_penalty": 1.1},
    "think": "low",
    "keep_alive": "5m",
    "stream": True,
}
OLLAMA_GENERATE = {
    "model": MODEL,
    "prompt": "47 + 85",
    "system": "Be brief.",
    "raw": False,
    "options": {"num_predict": 4, "temperature": 0.5},
    "format": "",
    "stream": False,
}
WHOLE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGE,
    "/v1/messages/count_tokens": MESSAGE,
    "/api/chat": OLLAMA_CHAT,
    "/api/generate": OLLAMA_GENERATE,
    "/api/show": {"model": MODEL, "name": MODEL},
    "/v1/lowtide/markdown": {"text": "a *b*"},
    "/api/pull": {"model": MODEL, "stream": True},
}

GONE = object()
DEEP: Any = None
for _ in range(100):
    DEEP = [{"type": DEEP}]
WRONG = [GONE, None, True, 0, -1, 2**31, 2**63, -(2**63) - 1, 1e308, float("nan"), float("inf")]
WRONG += ["", "\x00", "\ud800", "x" * 300, "../x", [], {}, [None], [[]], {"type": {}}, DEEP]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda each: (
        st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=8), each, max_size=3)
    ),
    max_leaves=6,
)


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each value inside another."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inside:
        yield (*above, key)
        if isinstance(each, dict | list):
            yield from places(each, (*above, key))


@st.composite
def changed(draw: st.DrawFn, body: dict[str, Any]) -> dict[str, Any]:
    """The body with other values at one to three places."""
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        if left := list(places(body)):
            *above, key = draw(st.sampled_from(left))
            parent = reduce(lambda value, each: value[each], above, body)
            value = draw(st.sampled_from(WRONG) | JSON)
            if value is GONE:
                del parent[key]
            else:
                parent[key] = copy.deepcopy(value)
    return body


@pytest.mark.parametrize("path", WHOLE)
def test_a_whole_request_is_answered(client: httpx.Client, check: Check, path: str) -> None:
    answer = client.post(path, json=WHOLE[path])
    assert answer.status_code == 200, answer.text
    check("POST", path, WHOLE[path])


@pytest.mark.parametrize("path", WHOLE)
def test_a_whole_request_with_something_else_in_it(check: Check, path: str) -> None:
    @bounded(50)
    @given(changed(WHOLE[path]))
    def ask(body: dict[str, Any]) -> None:
        check("POST", path, body)

    ask()


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize(
    "path",
    [path for path, of in DOCUMENT["paths"].items() if "requestBody" in of.get("post", {})],
)
def test_a_number_that_is_not_finite_is_refused_wherever_it_stands(
    client: httpx.Client, path: str, number: str
) -> None:
    """Python's parser takes it; an answer that repeats it would not be JSON."""
    body = json.dumps({**WHOLE[path], "metadata": {"a": ["NUMBER"]}})
    answer = client.post(path, content=body.replace('"NUMBER"', number))
    assert answer.status_code == 400
    check_error(path, answer.json())
    assert f"{number} is not a finite number" in answer.text
