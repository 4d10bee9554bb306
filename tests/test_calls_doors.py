"""Calls and parts of an answer in each API's form, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import anthropic
import httpx
import openai
import pytest
from scripted_serving import ScriptedService, done, listening
from small_tokenizers import FORMATS
from test_serve_parsing import as_told, read

from lowtide.parsing.pieces import CallArguments, CallBegun, Piece, Reasoning, Text
from lowtide.parsing.tools import Tool
from lowtide.serve.conversation import ToolCall, arguments_of

USER = [{"role": "user", "content": "x"}]
NO_JSON = [
    r'{"path": "C:\Users"}',
    '{"n": 01}',
    "{'a': 1}",
    '{"a": True}',
    '{"a": ',
    "[1]",
    "words",
    '{"a": 1} {"b": 2}',
    "{}}",
    "",
]


def call(arguments: str, name: str = "f") -> list[Piece]:
    """One call, in two parts."""
    half = len(arguments) // 2
    parts = [part for part in (arguments[:half], arguments[half:]) if part]
    return [CallBegun(0, "call_1", name), *(CallArguments(0, part) for part in parts)]


def chunks_of(text: str) -> list[dict[str, Any]]:
    """A stream's chunks, or the one object that there is."""
    if not text.startswith("data: "):
        return [json.loads(text)]
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def messages(url: str, stream: bool) -> Any:
    asked: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": USER}
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        if not stream:
            return client.messages.create(**asked)
        with client.messages.stream(**asked) as events:
            return events.get_final_message()


@pytest.mark.parametrize("reason", ["tool_calls", "length"])
@pytest.mark.parametrize("arguments", [*NO_JSON, '{"a": {"b": "</tool_call>"}}'])
def test_a_client_of_anthropic_s_gets_every_call(arguments: str, reason: str) -> None:
    """No stream ends in an error, both forms are equal, and what was cut is no call to run."""
    with listening(ScriptedService([*call(arguments), done(reason)])) as url:
        streamed, whole = (messages(url, stream) for stream in (True, False))
    assert streamed.stop_reason == whole.stop_reason
    inputs = [block.input for answer in (streamed, whole) for block in answer.content]
    assert inputs[0] == inputs[1] and isinstance(inputs[0], dict)
    try:
        value = json.loads(arguments)
    except ValueError:
        value = None
    if isinstance(value, dict):
        assert inputs[0] == value
    elif reason == "length":
        assert inputs[0] == {}
    else:
        assert inputs[0] == arguments_of(ToolCall("", "", arguments))


def test_arguments_as_templates_and_ollama_s_clients_get_them() -> None:
    for text, value in (
        ("", {}),
        (" \n", {}),
        ("{}", {}),
        ("{'a': None, 'b': [True, \"c\"]}", {"a": None, "b": [True, "c"]}),
        (r'{"path": "C:\Users\new"}', {"path": "C:\\Users\new"}),
        ("[1]", {"input": "[1]"}),
        ("words", {"input": "words"}),
    ):
        assert arguments_of(ToolCall("", "f", text)) == value


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_call_is_none_where_calls_come_whole(stream: bool) -> None:
    for arguments, num in (('{"a": "b', 0), ('{"a": "b"}', 1)):
        with listening(ScriptedService([*call(arguments), done("length")])) as url:
            body = {"model": "org/tiny", "messages": USER, "stream": stream}
            text = httpx.post(f"{url}/api/chat", json=body).text
        lines = [json.loads(line) for line in text.splitlines()]
        calls = [each for line in lines for each in line["message"].get("tool_calls", [])]
        assert len(calls) == num and lines[-1]["done_reason"] == "length"


def test_a_cut_call_at_openai_s_doors() -> None:
    script = [*call('{"a": "b'), done("length")]
    with listening(ScriptedService(script)) as url:
        chat = httpx.post(f"{url}/v1/chat/completions", json={"messages": USER}).json()
        response = httpx.post(f"{url}/v1/responses", json={"input": "x"}).json()
    assert chat["choices"][0]["finish_reason"] == "length"
    assert response["status"] == response["output"][0]["status"] == "incomplete"


PARTS: list[Piece] = [
    Reasoning("a"),
    Text("b"),
    Reasoning("c", is_new_part=True),
    Text("d", is_new_part=True),
    Text("e"),
    Text("f", is_new_part=True),
    done(),
]


def test_parts_are_apart_or_divided_at_every_door() -> None:
    with listening(ScriptedService(PARTS)) as url:
        for stream in (False, True):
            body = {"messages": USER, "stream": stream, "model": "org/tiny"}
            chat = httpx.post(f"{url}/v1/chat/completions", json=body).text
            choices = [choice for chunk in chunks_of(chat) for choice in chunk["choices"]]
            said = [choice.get("delta") or choice.get("message") or {} for choice in choices]
            assert "".join(d.get("content") or "" for d in said) == "b\nde\nf"
            assert "".join(d.get("reasoning", "") for d in said) == "a\nc"
            lines = httpx.post(f"{url}/api/chat", json=body).text.splitlines()
            said = [json.loads(line)["message"] for line in lines]
            assert "".join(d["content"] for d in said) == "b\nde\nf"
            assert "".join(d.get("thinking", "") for d in said) == "a\nc"
        for answer in (messages(url, True), messages(url, False)):
            texts = [block.text for block in answer.content if block.type == "text"]
            assert texts == ["b", "de", "f"]
        items = httpx.post(f"{url}/v1/responses", json={"input": "x"}).json()["output"]
        texts = [item["content"][0]["text"] for item in items if item["type"] == "message"]
        assert texts == ["b", "de", "f"]


# custom tools, and some of the tools, in chat completions

GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}
CUSTOM = {"type": "custom", "custom": {"name": "patch", "description": "d", "format": GRAMMAR}}
PLAIN = {"type": "custom", "custom": {"name": "say"}}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {}}}


def asked(**body: Any) -> tuple[ScriptedService, httpx.Response]:
    service = ScriptedService([Text("x"), done()])
    with listening(service) as url:
        tools = [CUSTOM, PLAIN, FUNCTION]
        all_of = {"messages": USER, "tools": tools, **body}
        return service, httpx.post(f"{url}/v1/chat/completions", json=all_of)


def test_custom_tools_are_functions_of_one_text() -> None:
    service, _ = asked(tool_choice={"type": "custom", "custom": {"name": "say"}})
    patch, say, function = service.asks[0].tools
    assert service.asks[0].tool_choice == "say"
    assert patch.grammar == 'start: "a"' and 'start: "a"' in patch.description
    assert list(say.parameters["properties"]) == ["input"] and function.parameters == {}


DOORS: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": lambda name: {
        "messages": USER,
        "tools": [{"type": "function", "function": {"name": name}}],
        "tool_choice": {"type": "function", "function": {"name": name}},
    },
    "/v1/responses": lambda name: {
        "input": "x",
        "tools": [{"type": "function", "name": name}],
        "tool_choice": {"type": "function", "name": name},
    },
    "/v1/messages": lambda name: {
        "messages": USER,
        "max_tokens": 9,
        "tools": [{"name": name, "input_schema": {}}],
        "tool_choice": {"type": "tool", "name": name},
    },
    "/api/chat": lambda name: {
        "model": "org/tiny",
        "messages": USER,
        "stream": False,
        "tools": [{"function": {"name": name}}],
    },
}
NAMES = ["f", "a.b", "a-b", "ünï", "a:b", "x" * 256]
NO_NAMES = ["get weather", 'a"b', "a>b", "a(b", "a{b", "a\nb", "a,b", " f", "é|"]


@pytest.mark.parametrize("path", DOORS)
def test_a_tool_has_a_name_that_can_be_called(path: str) -> None:
    """What is taken is read as a call in every form; other names are refused at every door."""
    for name in NAMES:
        for form in FORMATS:
            text, tool = form.text((name, {"a": 1})), Tool(name, "", {"properties": {"a": {}}})
            assert read(form.tokenizer, text, [tool], form.prompt) == [as_told(name, {"a": 1})]
    with listening(ScriptedService([Text("x"), done()])) as url:
        for name in (*NAMES, *NO_NAMES):
            answer = httpx.post(url + path, json=DOORS[path](name))
            assert answer.status_code == (200 if name in NAMES else 400), (name, answer.text)
            assert name in NAMES or "Rename it" in answer.text


@pytest.mark.parametrize("path", list(DOORS)[:3])
def test_a_tool_is_not_chosen_by_a_name_that_means_something_else(path: str) -> None:
    with listening(ScriptedService([Text("x"), done()])) as url:
        for name in ("auto", "none", "required"):
            answer = httpx.post(url + path, json=DOORS[path](name))
            assert answer.status_code == 400 and "rename the tool" in answer.text


def test_of_two_tools_of_one_name_the_later_counts() -> None:
    twice = [{"type": "function", "function": {"name": "patch"}}, CUSTOM]
    for tools, kind in ((twice, "custom"), (twice[::-1], "function")):
        service = ScriptedService([*call('{"input": "b"}', "patch"), done("tool_calls")])
        with listening(service) as url:
            asked = {"messages": USER, "tools": tools}
            answer = httpx.post(f"{url}/v1/chat/completions", json=asked).json()
        assert len(service.asks[0].tools) == 1
        assert answer["choices"][0]["message"]["tool_calls"][0]["type"] == kind


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_of_the_tools(mode: str) -> None:
    some = [
        {"type": "function", "function": {"name": "f"}},
        {"type": "custom", "custom": {"name": "say"}},
    ]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": some}}
    service, _ = asked(tool_choice=choice)
    assert [tool.name for tool in service.asks[0].tools] == ["say", "f"]
    assert service.asks[0].tool_choice == mode


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].custom: Field required"),
        ({"tools": [{"type": "function"}]}, "tools[0].function: Field required"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice.custom: Field required"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "no"}}}, "no tool for tool_choice"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "grammar"}}}]},
            "tools[0].custom.format.grammar: Field required",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]},
            "messages[0].tool_calls[0].custom: Field required",
        ),
    ],
)
def test_tools_that_say_too_little(body: dict[str, Any], reason: str) -> None:
    _, answer = asked(**body)
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"]


def test_a_custom_tool_s_call_comes_and_goes_as_its_text() -> None:
    text = 'one\n"two" \\ é'
    script: Sequence[Piece] = [
        *call(json.dumps({"input": text}), "patch"),
        CallBegun(1, "call_2", "f"),
        CallArguments(1, '{"a": 1}'),
        done("tool_calls"),
    ]
    service = ScriptedService(script)
    with (
        listening(service) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        body: dict[str, Any] = {"model": "org/tiny", "messages": USER, "tools": [CUSTOM, FUNCTION]}
        whole = client.chat.completions.create(**body).choices[0].message.model_dump()
        streamed: list[dict[str, Any]] = [{}, {}]
        for chunk in client.chat.completions.create(**body, stream=True):
            for delta in chunk.choices[0].model_dump()["delta"].get("tool_calls") or ():
                found = streamed[delta["index"]]
                for kind in ("custom", "function"):
                    for name, part in (delta.get(kind) or {}).items():
                        found[name] = found.get(name, "") + (part or "")
        first, second = whole["tool_calls"]
        assert first["type"] == "custom" and first["custom"] == {"name": "patch", "input": text}
        assert second["function"] == {"name": "f", "arguments": '{"a": 1}'}
        assert streamed == [first["custom"], second["function"]]
        client.chat.completions.create(**body | {"messages": [*USER, whole, *USER]})
    turn = service.asks[-1].conversation.turns[1]  # type: ignore[union-attr]
    assert [json.loads(each.arguments) for each in turn.tool_calls] == [{"input": text}, {"a": 1}]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "hm"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
        {"type": "reasoning", "text": "hm"},
    ],
)
def test_thoughts_among_an_assistant_s_parts(part: dict[str, Any]) -> None:
    told = {"role": "assistant", "content": [part, {"type": "text", "text": "b"}]}
    service, _ = asked(messages=[*USER, told, *USER])
    turn = service.asks[0].conversation.turns[1]  # type: ignore[union-attr]
    assert (turn.reasoning, turn.text) == ("hm", "b")


def test_a_message_without_a_block_is_refused_by_its_place() -> None:
    with listening(ScriptedService([done()])) as url:
        body = {"max_tokens": 9, "messages": [{"role": "user", "content": []}]}
        error = httpx.post(f"{url}/v1/messages", json=body).json()["error"]
    assert error["message"].startswith("messages[0].content has no block")
