"""The prompt that a conversation makes, whichever API it comes through."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from scripted_serving import ScriptedService, done, listening
from serving import Running, serving, talking_folder
from small_tokenizers import make_tokenizer
from test_chat_template import CHATML, REFUSING, STRICT

from lowtide import AsyncLLM
from lowtide.errors import UsageError

Said = list[tuple[str, str]]
"""Roles and texts, in order."""


def chat(said: Said) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in said]}


def ollama(said: Said) -> dict[str, Any]:
    return {"model": ScriptedService.model_name, "stream": False, **chat(said)}


def messages(said: Said) -> dict[str, Any]:
    return {"max_tokens": 8, **chat(said)}


def responses(said: Said) -> dict[str, Any]:
    return {"input": [{"type": "message", "role": role, "content": text} for role, text in said]}


DOORS: dict[str, Callable[[Said], dict[str, Any]]] = {
    "/v1/chat/completions": chat,
    "/api/chat": ollama,
    "/v1/messages": messages,
    "/v1/responses": responses,
}

CALL = {"type": "function", "id": "call00001", "function": {"name": "f", "arguments": "{}"}}
USED = {"type": "tool_use", "id": "call00001", "name": "f", "input": {}}
UNANSWERED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
    "/api/chat": {
        "messages": [
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
        ]
    },
    "/v1/messages": {"messages": [{"role": "assistant", "content": [USED]}]},
    "/v1/responses": {
        "input": [{"type": "function_call", "call_id": "call00001", "name": "f", "arguments": "{}"}]
    },
}


@pytest.fixture(scope="module")
def service() -> ScriptedService:
    return ScriptedService([done()])


@pytest.fixture(scope="module")
def url(service: ScriptedService) -> Iterator[str]:
    with listening(service) as url:
        yield url


def prompt(url: str, service: ScriptedService, path: str, body: object, template: str) -> str:
    answer = httpx.post(url + path, json=body)
    assert answer.status_code == 200, answer.text
    conversation = service.asks[-1].conversation
    assert conversation is not None
    return make_tokenizer(template=template).render_chat(conversation.messages())


@pytest.mark.parametrize("path", DOORS)
@pytest.mark.parametrize(
    ("template", "said", "expected"),
    [
        (STRICT, [("system", "S"), ("user", "a"), ("user", "b")], "[user]S\na\nb"),
        (STRICT, [("user", "a"), ("assistant", "b"), ("assistant", "c"), ("user", "d")], None),
        (REFUSING, [("user", "a"), ("system", "a"), ("user", "b")], "[user]a\n\na\n\nb"),
        (CHATML, [("user", "a"), ("assistant", "I say ")], "<user>a</><assistant>I say "),
        (CHATML, [("user", "a"), ("assistant", "")], "<user>a</><assistant>"),
    ],
)
def test_all_doors_make_the_same_prompt(
    url: str, service: ScriptedService, path: str, template: str, said: Said, expected: str | None
) -> None:
    found = prompt(url, service, path, DOORS[path](said), template)
    assert found == (expected or "[user]a[assistant]b\nc[user]d")


@pytest.mark.parametrize("path", UNANSWERED)
def test_a_conversation_that_ends_with_calls_is_refused_by_name(
    url: str, service: ScriptedService, path: str
) -> None:
    [(field, [called])] = UNANSWERED[path].items()
    body = DOORS[path]([("user", "a")])
    with pytest.raises(UsageError, match="Message 1, the last one, calls tools"):
        prompt(url, service, path, {**body, field: [*body[field], called]}, CHATML)


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = talking_folder(tmp_path_factory.mktemp("begun") / "model")
    llm = AsyncLLM(folder, context=256, cache="off")
    with serving(llm, served_name=ScriptedService.model_name) as running:
        yield running
    asyncio.run(llm.close())


BEGUN = [("user", "47 + 85"), ("assistant", "1")]


@pytest.mark.parametrize("path", DOORS)
def test_an_answer_that_is_begun_is_continued(talking: Running, path: str) -> None:
    tokenizer = talking.service.llm.tokenizer
    assert tokenizer is not None
    expected = tokenizer.encode("user: 47 + 85\nassistant: 1", add_special=False)
    with talking.client() as client:
        answer = client.post(path, json=DOORS[path](BEGUN))
        assert answer.status_code == 200, answer.text
        usage = answer.json().get("usage") or answer.json()
    names = ("prompt_tokens", "input_tokens", "prompt_eval_count")
    assert [usage[name] for name in names if name in usage] == [len(expected)]


FORMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"response_format": {"type": "json_object"}},
    "/api/chat": {"format": "json"},
    "/v1/messages": {"output_format": {"type": "json_schema", "schema": {"type": "object"}}},
    "/v1/responses": {"text": {"format": {"type": "json_object"}}},
}


@pytest.mark.parametrize("path", FORMS)
def test_a_form_is_of_whole_answers(talking: Running, path: str) -> None:
    with talking.client() as client:
        answer = client.post(path, json={**DOORS[path](BEGUN), **FORMS[path]})
    assert answer.status_code == 400 and "answer that is begun" in answer.text


@pytest.mark.parametrize("said", [BEGUN, BEGUN[:1]])
def test_fields_of_vllm_may_say_how_a_conversation_ends(talking: Running, said: Said) -> None:
    is_begun = said == BEGUN
    right = {"continue_final_message": is_begun, "add_generation_prompt": not is_begun}
    with talking.client() as client:
        for fields in (right, *({name: value} for name, value in right.items())):
            answer = client.post("/v1/chat/completions", json={**chat(said), **fields})
            assert answer.status_code == 200, answer.text
        for name, value in right.items():
            answer = client.post("/v1/chat/completions", json={**chat(said), name: not value})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == name
