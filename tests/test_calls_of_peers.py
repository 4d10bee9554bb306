"""Cases of llama.cpp's, vLLM's and SGLang's tests of parsers, for the families here."""

from __future__ import annotations

import json
from typing import Any

import pytest
from small_tokenizers import CODER, DEEPSEEK_3, GPT_OSS, MISTRAL, OLD_MISTRAL, QWEN, CallFormat
from test_calls_whole import parameter, xml
from test_serve_parsing import read

from lowtide.parsing.tools import Tool

ANY = Tool("f", "", {"type": "object", "properties": {"a": {}, "b": {}}})
WEATHER = Tool(
    "weather",
    "",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "state": {"type": "string"},
            "unit": {"type": "string", "enum": ["fahrenheit", "celsius"]},
        },
        "required": ["city", "state"],
    },
)
TOOLS = (ANY, WEATHER)

JSON = '{"name": "f", "arguments": {"a": true}}'
REVERSED = '{"arguments": {"name": "John"}, "name": "f"}'


def called(value: object, name: str = "f") -> tuple[str, str, object]:
    return ("call", name, value)


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        # Hermes
        (QWEN, f"<tool_call>\n{JSON}", [called({"a": True})]),
        (QWEN, f"<tool_call>\n{REVERSED}", [called({"name": "John"})]),
        (QWEN, f"<tool_call>{JSON}</tool_call>" * 2, [called({"a": True})] * 2),
        (
            QWEN,
            '<tool_call>\n{"name": "f", "arguments": "{\\"a\\": \\"b\\"}"}\n</tool_call>',
            [called({"a": "b"})],
        ),
        (QWEN, '<tool_call>{"name": "f", "arguments": "b"}</tool_call>', [called("b")]),
        # Mistral, before and after its arguments had a mark
        (OLD_MISTRAL, f"[TOOL_CALLS] [{JSON}]", [called({"a": True})]),
        (OLD_MISTRAL, f"Hello[TOOL_CALLS][{JSON}]", [("Text", "Hello"), called({"a": True})]),
        (OLD_MISTRAL, f"[TOOL_CALLS] [{REVERSED}]", [called({"name": "John"})]),
        (
            OLD_MISTRAL,
            '[TOOL_CALLS]  [ {"name":"f" , "arguments" : {"a": 3} } ]',
            [called({"a": 3})],
        ),
        (
            OLD_MISTRAL,
            f"[TOOL_CALLS] [{JSON}]\nmore behind it",
            [called({"a": True}), ("Text", "more behind it")],
        ),
        (MISTRAL, '[TOOL_CALLS]f{"a": 3.5}', [called({"a": 3.5})]),
        (
            MISTRAL,
            'so{[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g{"b": "re(\'{}\')"}',
            [("Text", "so{"), called({"a": 1}), called({"b": "re('{}')"}, "g")],
        ),
        # DeepSeek
        (
            DEEPSEEK_3,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
            '{"a": 1}```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            [called({"a": 1})],
        ),
        (
            DEEPSEEK_3,
            "<｜tool▁calls▁begin｜>"
            + "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>"
            * 2
            + "<｜tool▁calls▁end｜>",
            [called({})] * 2,
        ),
    ],
)
@pytest.mark.parametrize("step", [1, 3, 100_000])
def test_calls_in_json(
    form: CallFormat, text: str, expected: list[tuple[Any, ...]], step: int
) -> None:
    assert typed(read(form.tokenizer, text, TOOLS, step=step)) == expected


def typed(found: list[tuple[str, ...]]) -> list[tuple[Any, ...]]:
    """The same with arguments as values."""
    return [(*one[:2], json.loads(one[2])) if one[0] == "call" else one for one in found]


@pytest.mark.parametrize(
    ("header", "arguments"),
    [
        ("<|channel|>commentary to=functions.f <|constrain|>json", '{\n"a": "b"\n}'),
        ("<|channel|>commentary to=functions.f", '{"a": "b"}'),
        ("<|channel|>analysis to=functions.f", '{"a": "b"}'),
        (" to=functions.f<|channel|>analysis <|constrain|>json", '{"a": "b"}'),
        (" to=functions.f<|channel|>commentary", "foo"),
        ("<|channel|>commentary to=functions.f <|constrain|>json", "{}"),
    ],
)
def test_recipients_of_gpt_oss(header: str, arguments: str) -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    text += f"{header}<|message|>{arguments}<|call|>"
    found = read(GPT_OSS.tokenizer, text, TOOLS, GPT_OSS.prompt)
    assert found == [("Reasoning", "hm"), ("call", "f", arguments)]


def test_a_message_without_a_word_has_no_arguments() -> None:
    text = "<|channel|>commentary to=functions.f<|message|><|call|>"
    assert read(GPT_OSS.tokenizer, text, TOOLS, GPT_OSS.prompt) == [("call", "f", "{}")]


def test_an_end_that_was_forgotten() -> None:
    call = xml("<parameter=city>\nDallas\n", parameter("state", "TX"), name="weather")
    expected = called({"city": "Dallas", "state": "TX"}, "weather")
    for step in (1, 100_000):
        found = read(CODER.tokenizer, f"Let me look:\n{call}", TOOLS, step=step)
        assert typed(found) == [("Text", "Let me look:"), expected]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "number"}, "9007199254740993", 9007199254740993),
        ({"type": "number"}, " 18446744073709551615 ", 18446744073709551615),
        ({"type": "number"}, "-12.5", -12.5),
        ({"type": "number"}, "not-a-number", "not-a-number"),
        ({"type": "number"}, "null", None),
        ({"type": "float"}, "3.14", 3.14),
        ({"type": "str"}, "3.14", "3.14"),
        ({"type": "object"}, '{"width": 10, \n "height": 20}', {"width": 10, "height": 20}),
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, "9007199254740993", 9007199254740993),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "true", True),
        (
            {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
            "some text",
            "some text",
        ),
        ({"type": ["string", "object"]}, '{"a": 1}', {"a": 1}),
        ({"type": ["string", "object"]}, "{not json", "{not json"),
        ({"type": ["string", "integer"]}, "2 dollars", "2 dollars"),
        ({"enum": ["celsius", "fahrenheit"]}, "celsius", "celsius"),
    ],
)
def test_values_of_qwen3_coder(schema: dict[str, Any], text: str, value: object) -> None:
    tool = Tool("lookup", "", {"type": "object", "properties": {"value": schema}})
    call = f"<tool_call><function=lookup><parameter=value>{text}</parameter></function></tool_call>"
    for step in (1, 11, 100_000):
        found = typed(read(CODER.tokenizer, call, (tool,), step=step))
        assert found == [called({"value": value}, "lookup")]
        assert type(found[0][2]["value"]) is type(value)


def test_members_of_alternatives() -> None:
    payload = {"type": "object", "properties": {"value": {"type": "string"}}}
    acme = {"properties": {"kind": {"const": "acme"}, "payload": {"$ref": "#/$defs/payload"}}}
    other = {"properties": {"kind": {"const": "7"}}}
    schema = {
        "$defs": {"payload": payload, "acme": acme},
        "oneOf": [{"$ref": "#/$defs/acme"}, other],
    }
    tool = Tool("f", "", schema)
    for kind in ("acme", "7"):
        call = xml(parameter("kind", kind), parameter("payload", '{"value": "x"}'), name="f")
        expected = called({"kind": kind, "payload": {"value": "x"}})
        assert typed(read(CODER.tokenizer, call, (tool,))) == [expected]
