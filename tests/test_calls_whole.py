"""A model's call reaches the client whole and typed, or not as a call.

Marks inside values, forgotten marks, calls in thoughts, answers that are cut.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import (
    CODER,
    DEEPSEEK,
    DEEPSEEK_31,
    FORMATS,
    GEMMA,
    GEMMA_MARKS,
    GLM,
    GLM_47,
    GLM_MARKS,
    GPT_OSS,
    HARMONY,
    HELD,
    KIMI_MARKS,
    LFM2_MARKS,
    MINIMAX,
    MINIMAX_MARKS,
    MISTRAL,
    OLD_MISTRAL,
    PLAIN,
    QWEN,
    THINK,
    CallFormat,
    make_tokenizer,
)
from test_serve_parsing import as_told, cut, read, told

from lowtide.parsing import parser_of, xml_calls, xml_text
from lowtide.parsing.pieces import Reasoning, Text, joined
from lowtide.parsing.schema_types import MAX_CHOICES, SchemaTypes
from lowtide.parsing.tools import Tool
from lowtide.parsing.xml_syntax import XmlSyntax

MARKS = (
    *("<tool_call>", "</tool_call>", "<function=write>", "<function=x>", "</function>"),
    *("<parameter=other>", "<parameter=content>", "</parameter>", *THINK, *DEEPSEEK, *HARMONY),
    *GLM_MARKS,
    *("<arg_key>content</arg_key>", '<invoke name="x">', '<parameter name="content">', "</invoke>"),
    *(*KIMI_MARKS, *MINIMAX_MARKS, *LFM2_MARKS, *GEMMA_MARKS),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|endoftext|>", "<|im_end|>", "```", "functions.f"),
)
SNIPPETS = (
    *MARKS,
    '")]',
    "')",
    "call:x{",
    "x(a=",
    *'{}[](),:="\\\n ',
    "\\n",
    "é",
    "😀",
    "a",
    '{"name": "f", "arguments": {',
    "</",
    "<",
)

WRITE = Tool(
    "write",
    "",
    {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "content": {"type": "string"},
            "lines": {"type": "array"},
        },
        "required": ["path", "content", "lines"],
    },
)
OTHER = Tool("x", "", {"type": "object", "properties": {"a": {"type": "string"}}})
TOOLS = (WRITE, OTHER)

NEXT = {
    CODER.name: "<parameter=content>",
    MINIMAX.name: '<parameter name="content">',
    **dict.fromkeys((GLM.name, GLM_47.name), "<arg_key>content</arg_key>"),
}
"""What begins the second parameter of `WRITE`, where values are raw."""

BEGINS = {
    CODER.name: ["<function="],
    MINIMAX.name: ["<invoke"],
    **dict.fromkeys((GLM.name, GLM_47.name), ["<tool_call>"]),
}

named = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)

values = st.lists(st.sampled_from(SNIPPETS) | st.text(max_size=3), max_size=10).map("".join)


def with_specials(form: CallFormat) -> CallFormat:
    """The same form, whose tokenizer also has marks of others as special tokens."""
    special = list(form.tokenizer.special_texts.values())
    own = [m for m in MARKS if form.tokenizer.token_id(m) is not None and m not in special]
    others = [m for m in MARKS if m.startswith("<|im")]
    names = [m for m in (*MARKS, "<function=", "```json") if form.tokenizer.template_names(m)]
    tokenizer = make_tokenizer(tuple(own), (*special, *others), "{{ tools }}" + "".join(names))
    return form._replace(tokenizer=tokenizer)


def read_cut(form: CallFormat, text: str, parts: Sequence[slice]) -> list[tuple[str, ...]]:
    ids = form.tokenizer.encode(text)
    parser = parser_of(form.tokenizer, form.tokenizer.encode(form.prompt), TOOLS)
    pieces = [piece for part in parts for piece in parser.feed(ids[part])]
    return told([*pieces, *parser.finish()])


@examples(150)
@given(values, values, st.sampled_from(FORMATS), st.booleans(), st.data())
def test_a_value_may_hold_any_mark(
    path: str, content: str, form: CallFormat, has_specials: bool, data: st.DataObject
) -> None:
    """In every form, however the answer is divided, and whether a mark is a token or not."""
    arguments: dict[str, object] = {
        "path": path,
        "content": content,
        "lines": [content, {"a": path}],
    }
    form = with_specials(form) if has_specials else form
    text = form.text(("write", arguments))
    if form.name in NEXT and NEXT[form.name] in path:
        return  # whoever writes a name of the schema that is still to come means a parameter
    if form.name == GEMMA.name and GEMMA_MARKS[2] in path + content:
        return  # nothing escapes a quote there
    num = len(form.tokenizer.encode(text))
    assert read_cut(form, text, cut(data, num)) == [as_told("write", arguments)]


@examples(60)
@given(st.lists(values, min_size=2, max_size=3), st.sampled_from(FORMATS), st.data())
def test_several_calls_with_any_mark(
    contents: list[str], form: CallFormat, data: st.DataObject
) -> None:
    if form is GPT_OSS:
        return  # a message is one call
    if form is GEMMA:
        contents = [each.replace(GEMMA_MARKS[2], "") for each in contents]
    for begin in BEGINS.get(form.name, ()):
        contents = [each.replace(begin, "<") for each in contents]
    calls = [("write", {"path": "a", "content": each, "lines": []}) for each in contents]
    text = form.text(*calls)
    num = len(form.tokenizer.encode(text))
    assert read_cut(form, text, cut(data, num)) == [as_told(*call) for call in calls]


def xml(*parts: str, name: str = "write", end: str = "</function>\n</tool_call>") -> str:
    return f"<tool_call>\n<function={name}>\n{''.join(parts)}{end}"


def parameter(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


EXAMPLE = xml(parameter("path", "b"), parameter("content", "c"), parameter("lines", "[]"))


@pytest.mark.parametrize(
    "content",
    [
        EXAMPLE,
        f"first\n{EXAMPLE}\nthen\n{EXAMPLE}\nso",
        "</parameter>\n</function>\n</tool_call>\nmore",
        "</parameter>\n</function>\n</tool_call>",
        "<parameter=path>\nx\n</parameter>",
        "<parameter=unknown>\nx\n</parameter>\n",
        "<function=x>\n<parameter=a>\nnever closed",
        "</tool_call>",
        "a </function> b",
        "one\n\n",
        "",
    ],
)
def test_a_file_about_calls_is_written_whole(content: str) -> None:
    call = xml(parameter("path", "a"), parameter("content", content), parameter("lines", "[1]"))
    expected = as_told("write", {"path": "a", "content": content, "lines": [1]})
    for step in (1, 3, 100_000):
        assert read(CODER.tokenizer, call, TOOLS, step=step) == [expected]
        assert read(CODER.tokenizer, f"Now.\n{call}\n{call}", TOOLS, step=step) == [
            ("Text", "Now."),
            expected,
            expected,
        ]


@pytest.mark.parametrize(
    "call",
    [
        xml("<parameter=path>\na\n<parameter=content>\nb\n<parameter=lines>\n[1]\n"),
        xml("<parameter=path>\na\n", parameter("content", "b"), "<parameter=lines>\n[1]\n"),
        xml(parameter("path", "a"), "<parameter=content>\nb\n", parameter("lines", "[1]")),
        xml("<parameter=path>a</parameter><parameter=content>b</parameter>"
            "<parameter=lines>[1]</parameter>"),
        xml(parameter("path", "a"), parameter("content", "b"), "<parameter=lines>\n[1]\n",
            end="</function>"),
        xml(parameter("path", "a"), parameter("content", "b"), parameter("lines", "[1]"),
            end="</tool_call>"),
        xml(parameter("path", "a"), parameter("content", "b"),
            parameter("lines", "[1]")).removeprefix("<tool_call>\n"),
    ],
)  # fmt: skip
def test_a_forgotten_mark_takes_nothing_along(call: str) -> None:
    expected = as_told("write", {"path": "a", "content": "b", "lines": [1]})
    for step in (1, 100_000):
        assert read(CODER.tokenizer, call, TOOLS, step=step) == [expected]


@named
@examples(20)
@given(
    st.lists(
        st.text(st.sampled_from("aé😀 <>\"'=:,(){}[]\n\\/@$|.-"), max_size=6),
        min_size=1,
        max_size=3,
        unique=True,
    ),
    st.booleans(),
)
def test_a_schema_s_names_are_read_however_they_are_spelled(
    form: CallFormat, names: list[str], is_inner: bool
) -> None:
    """A grammar makes the model write them as they are, also in an object."""
    members = {name: {"type": "string"} for name in names}
    schema: dict[str, Any] = {"type": "object", "properties": members, "required": names}
    given: dict[str, Any] = dict.fromkeys(names, "v")
    if is_inner:
        schema, given = {"type": "object", "properties": {"o": schema}}, {"o": given}
    text = form.text(("f", given))
    assert read(form.tokenizer, text, [Tool("f", "", schema)], form.prompt) == [as_told("f", given)]


def test_a_name_that_the_schema_has_not() -> None:
    """It is of the text before it, and a parameter behind a value that is no text."""
    call = xml(parameter("lines", "[1]"), parameter("why", "x"), parameter("path", "a"))
    expected = as_told("write", {"lines": [1], "why": "x", "path": "a"})
    assert read(CODER.tokenizer, call, TOOLS) == [expected]
    call = xml(parameter("path", "a"), parameter("why", "x"))
    path = "a\n</parameter>\n<parameter=why>\nx"
    assert read(CODER.tokenizer, call, TOOLS) == [as_told("write", {"path": path})]
    call = xml(parameter("a", "1"), parameter("b", "x"), name="unknown")
    assert read(CODER.tokenizer, call, TOOLS) == [as_told("unknown", {"a": 1, "b": "x"})]


# types

INTEGER, STRING = {"type": "integer"}, {"type": "string"}
DEFINED = {
    "text": STRING,
    "number": {"$ref": "#/$defs/deeper"},
    "deeper": INTEGER,
    "self": {"anyOf": [{"$ref": "#/$defs/self"}, {"type": "null"}]},
    "colour": {"enum": ["1", "2"]},
    "a/b": {"type": "boolean"},
}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (STRING, "12", "12"),
        (STRING, "True", "True"),
        (STRING, "{'a': 1}", "{'a': 1}"),
        (STRING, "null", "null"),
        (INTEGER, "12", 12),
        (INTEGER, "12345678901234567890123", 12345678901234567890123),
        (INTEGER, "many", "many"),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "null"}, "None", None),
        ({"type": "object"}, "{'a': None, \"b\": [True, 'it\\'s \"x\"']}", None),
        ({"type": "array"}, "[1, 2,]", [1, 2]),
        ({"type": "array"}, "['a\\n', '\\x41']", ["a\n", "A"]),
        ({}, "12", 12),
        ({}, "x", "x"),
        ({"description": "any"}, "{'a': 1}", {"a": 1}),
        ({"minLength": 1}, "12", "12"),
        ({"items": {}}, "['a']", ["a"]),
        ({"properties": {}}, "{'a': 1}", {"a": 1}),
        ({"minimum": 1}, "12", 12),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": [1, "1"]}, "1", "1"),
        ({"enum": ["a", 2, None]}, "2", 2),
        ({"enum": ["a", 2, None]}, "null", None),
        ({"const": "5"}, "5", "5"),
        ({"const": 5}, "5", 5),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": "string", "nullable": True}, "5", "5"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["integer", "string"]}, "5", 5),
        ({"type": ["integer", "string"]}, "5 or 6", "5 or 6"),
        ({"anyOf": [STRING, {"type": "array"}]}, '["a"]', ["a"]),
        ({"anyOf": [STRING, {"type": "array"}]}, "['a']", "['a']"),
        ({"oneOf": [{"const": "1"}, {"const": "2"}]}, "2", "2"),
        ({"$ref": "#/$defs/text"}, "12", "12"),
        ({"$ref": "#/$defs/number"}, "12", 12),
        ({"$ref": "#/$defs/colour"}, "1", "1"),
        ({"$ref": "#/$defs/a~1b"}, "True", True),
        ({"$ref": "#/$defs/self"}, "12", 12),
        ({"$ref": "#/$defs/none"}, "12", 12),
        ({"$ref": "elsewhere"}, "12", 12),
        ({"$ref": "#/properties/other"}, "12", "12"),
        ({"allOf": [{"$ref": "#/$defs/text"}, {"minLength": 1}]}, "12", "12"),
        ({"allOf": [{"type": ["string", "integer"]}, STRING]}, "12", "12"),
        ({"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]}, "12", "12"),
        ({"anyOf": [{"$ref": "#/$defs/number"}, {"type": "null"}]}, "None", None),
    ],
)
def test_a_value_has_its_schema_s_type(schema: dict[str, Any], text: str, value: object) -> None:
    parameters = {"properties": {"a": schema, "other": STRING}, "$defs": DEFINED}
    if value is None and text.startswith("{'a'"):
        value = {"a": None, "b": [True, 'it\'s "x"']}
    for wrapped in (
        parameters,
        {"$ref": "#/$defs/root", "$defs": {**DEFINED, "root": {"properties": {"a": schema}}},
         "properties": {"other": STRING}},
        {"allOf": [{"properties": {"a": schema}}, {"properties": {"other": STRING}}],
         "properties": {"other": STRING}, "$defs": DEFINED},
    ):  # fmt: skip
        call = xml(parameter("a", text), name="f")
        found = read(CODER.tokenizer, call, [Tool("f", "", wrapped)])
        assert found == [as_told("f", {"a": value})]


def test_a_hostile_schema_is_read_in_bounds() -> None:
    chain: dict[str, Any] = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(30_000)}
    wide = {"anyOf": [{"$ref": "#/$defs/w"}] * 50, "allOf": [{"$ref": "#/$defs/w"}] * 50}
    for schema, defined in (
        ({"$ref": "#/$defs/0"}, chain),
        ({"$ref": "#/$defs/w"}, {"w": wide}),
        ({"$ref": "#"}, {}),
        ({"allOf": [{"$ref": "#/$defs/a"}]}, {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}),
        ({"anyOf": 3, "oneOf": [], "allOf": [3, None], "enum": 3, "$ref": 4, "type": {}}, {}),
    ):
        parameters = {"properties": {"a": schema}, "$defs": defined}
        call = xml(parameter("a", "12"), name="f")
        found = read(CODER.tokenizer, call, [Tool("f", "", parameters)])
        assert found == [as_told("f", {"a": 12})]


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf"])
def test_values_that_schemas_list_are_joined_in_bounds(keyword: str) -> None:
    twice = {str(i): {keyword: [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(40)}
    defined = {**twice, "40": {"enum": list(map(str, range(100)))}}
    kind = SchemaTypes({"$defs": defined}).of({"$ref": "#/$defs/0"})
    assert kind.choices == tuple(map(str, range(100)))
    lists = [{"enum": [f"{i}.{j}" for j in range(10_000)]} for i in range(2)]
    wide = SchemaTypes({}).of({keyword: [*lists * 8, {"const": "last"}]})
    assert wide.is_text and len(wide.choices or ()) <= MAX_CHOICES


def test_ends_that_may_be_of_a_value_are_tried_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_read = 0

    def counted(syntax: XmlSyntax, text: str, tools: Any) -> Any:
        nonlocal num_read
        num_read += 1
        return xml_text.xml_call(syntax, text, tools)

    monkeypatch.setattr(xml_calls, "xml_call", counted)
    end = "</parameter>\n</function>\n</tool_call>"
    inner = f"\n<tool_call>\n<function=write>\n<parameter=path>\nb\n{end}\n{end}"
    text = xml(parameter("content", f"a\n{end}{inner * 50}"))
    read(CODER.tokenizer, text, TOOLS)
    assert 2 <= num_read <= 40


@pytest.mark.parametrize("between", ["1, ", "1]", "x", ""])
@pytest.mark.parametrize("kind", ["array", "object", "string", "integer"])
def test_a_value_of_many_marks_is_read_a_few_times(
    monkeypatch: pytest.MonkeyPatch, kind: str, between: str
) -> None:
    num_read = 0
    parse = xml_text.parse_json

    def counted(text: str | bytes) -> Any:
        nonlocal num_read
        num_read += len(text)
        return parse(text)

    monkeypatch.setattr(xml_text, "parse_json", counted)
    monkeypatch.setattr(xml_text, "loose_json", counted)
    tool = Tool("f", "", {"properties": {"a": {"type": kind}, "b": STRING}})
    value = "[" + f"\n{between}<parameter=b>" * 800
    read(CODER.tokenizer, xml(parameter("a", value), name="f"), [tool])
    assert num_read < 40 * len(value)


# thoughts


@pytest.mark.parametrize("form", [QWEN, DEEPSEEK_31], ids=lambda form: form.name)
@pytest.mark.parametrize("prompt", ["", "q<think>\n"])
def test_a_call_in_thoughts_that_are_not_closed_is_one(form: CallFormat, prompt: str) -> None:
    arguments = {"path": "</think>", "content": "x"}
    call = form.text(("write", arguments))
    text = ("" if prompt else "<think>") + f"hm {call}"
    expected = [("Reasoning", "hm"), as_told("write", arguments)]
    for step in (1, 4, 100_000):
        assert read(form.tokenizer, text, TOOLS, prompt, step) == expected
        assert read(form.tokenizer, text + "\n", TOOLS, prompt, step)[:2] == expected
    spoken = f"I could say {call}, no.\n</think>\n\nNo."
    for step in (1, 4, 100_000):
        found = read(form.tokenizer, spoken, TOOLS, "q<think>\n", step)
        assert found == [("Reasoning", f"I could say {call}, no."), ("Text", "No.")]


def test_thoughts_that_speak_of_half_a_call() -> None:
    half = 'I write <tool_call>{"name": "write", "arguments": {"path": "'
    for step in (1, 100_000):
        found = read(QWEN.tokenizer, f"{half}\n</think>\n\nNo.", TOOLS, "q<think>\n", step)
        assert found == [("Reasoning", half), ("Text", "No.")]
    text = "<think>say <tool_call> at first</think>Yes."
    found = read(QWEN.tokenizer, text, TOOLS)
    assert found == [("Reasoning", "say <tool_call> at first"), ("Text", "Yes.")]


def test_thoughts_with_calls_are_told_once_no_call_can_come_of_them() -> None:
    parser = parser_of(QWEN.tokenizer, [], TOOLS)
    pieces = parser.feed(QWEN.tokenizer.encode("<think>say <tool_call> first"))
    assert joined(pieces, Reasoning) == "say <tool_call> first"


def test_marks_of_thoughts_behind_thoughts_are_text() -> None:
    for prompt, begin in (("", "<think>"), ("q<think>\n", "")):
        text = f"{begin}hm, <think>?</think>The <think> mark, closed by </think>: so."
        found = read(QWEN.tokenizer, text, TOOLS, prompt)
        said = "The <think> mark, closed by </think>: so."
        assert found == [("Reasoning", "hm, <think>?"), ("Text", said)]
    assert read(QWEN.tokenizer, "a</think>b", TOOLS) == [("Text", "ab")]  # two parts
    twice = "<think>\n\n</think>\n\n<think>hm</think>Yes."
    assert read(QWEN.tokenizer, twice, TOOLS) == [("Reasoning", "hm"), ("Text", "Yes.")]


# parts of one field


def test_parts_that_one_field_joins_are_divided() -> None:
    text = (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>b"
        "<|end|><|start|>assistant<|channel|>analysis<|message|>c<|end|><|start|>assistant"
        "<|channel|>final<|message|>d<|return|>"
    )
    parser = parser_of(GPT_OSS.tokenizer, GPT_OSS.tokenizer.encode(GPT_OSS.prompt), TOOLS)
    pieces = [*parser.feed(GPT_OSS.tokenizer.encode(text)), *parser.finish()]
    assert (joined(pieces, Reasoning), joined(pieces, Text)) == ("a\nc", "b\nd")
    text = f"before\n{QWEN.text(('x', {}))}\nbehind"
    parser = parser_of(QWEN.tokenizer, [], TOOLS)
    pieces = [*parser.feed(QWEN.tokenizer.encode(text)), *parser.finish()]
    assert joined(pieces, Text) == "before\nbehind"


# channels


def test_of_two_channels_the_last_counts() -> None:
    def message(header: str, text: str, end: str = "<|end|>") -> str:
        return f"{header}<|message|>{text}{end}"

    for first in ("commentary to=assistant", "final"):
        text = message(f"<|channel|>{first}<|channel|>analysis", "hm")
        text += message(
            f"<|start|>assistant<|channel|>{first}<|channel|>final", "Yes.", "<|return|>"
        )
        found = read(GPT_OSS.tokenizer, text, TOOLS, GPT_OSS.prompt)
        assert found == [("Reasoning", "hm"), ("Text", "Yes.")]
    own = message("<|channel|>commentary to=python code", "print(1)", "<|call|>")
    assert read(GPT_OSS.tokenizer, own, TOOLS, GPT_OSS.prompt) == [("Reasoning", "print(1)")]
    called = message("<|channel|>analysis to=write", '{"path": "a"}', "<|call|>")
    expected = [as_told("write", {"path": "a"})]
    assert read(GPT_OSS.tokenizer, called, TOOLS, GPT_OSS.prompt) == expected


def test_a_mark_in_a_message_of_text() -> None:
    text = "<|channel|>final<|message|>Say <|end|> and <|call|> then <|message|>.<|return|>"
    found = read(GPT_OSS.tokenizer, text, TOOLS, GPT_OSS.prompt)
    assert found == [("Text", "Say <|end|> and <|call|> then <|message|>.")]


# answers that are cut


@named
def test_a_cut_call_is_never_a_whole_one(form: CallFormat) -> None:
    """Wherever the length ends an answer, what is told of a call is its beginning."""
    arguments = {"path": "a", "content": "b</tool_call>c", "lines": [1, 2]}
    text = form.text(("write", arguments))
    ids, (_, _, whole) = form.tokenizer.encode(text), as_told("write", arguments)
    for num in range(len(ids)):
        parser = parser_of(form.tokenizer, form.tokenizer.encode(form.prompt), TOOLS)
        found = told([*parser.feed(ids[:num]), *parser.finish(is_cut=True)])
        for kind, *rest in found:
            if kind == "call":
                assert whole.startswith(rest[1])
                assert form not in HELD or rest[1] == whole


def test_mistral_s_call_without_arguments_is_none_when_it_is_cut() -> None:
    for text in ("[TOOL_CALLS]write[ARGS]", "[TOOL_CALLS]write[CALL_ID]abcdefghi"):
        ids = MISTRAL.tokenizer.encode(text)
        parser = parser_of(MISTRAL.tokenizer, [], TOOLS)
        assert told([*parser.feed(ids), *parser.finish(is_cut=True)]) == [("Text", text)]
    ids = OLD_MISTRAL.tokenizer.encode('[TOOL_CALLS][{"arguments": {"a": 1}, "name": "x"}]')
    for num in range(len(ids)):
        parser = parser_of(OLD_MISTRAL.tokenizer, [], TOOLS)
        found = told([*parser.feed(ids[:num]), *parser.finish(is_cut=True)])
        assert all(kind == "Text" for kind, *_ in found)


def test_a_call_s_own_id() -> None:
    text = '[TOOL_CALLS]x[CALL_ID]123456789[ARGS]{"a": "b"}'
    parser = parser_of(MISTRAL.tokenizer, [], TOOLS)
    pieces: list[Any] = parser.feed(MISTRAL.tokenizer.encode(text + text + text.replace("9", "")))
    ids = [piece.id for piece in pieces if hasattr(piece, "id")]
    assert ids[0] == "123456789" and len(set(ids)) == 3 and all(len(each) == 9 for each in ids)


def test_marks_that_are_text_are_read_as_tokens_are() -> None:
    content = "<tool_call>\n</tool_call>"
    call = PLAIN.text(("write", {"path": content, "content": content}))
    assert read(PLAIN.tokenizer, call, TOOLS) == read(QWEN.tokenizer, call, TOOLS)
    assert json.loads(read(PLAIN.tokenizer, call, TOOLS)[0][2])["path"] == content
