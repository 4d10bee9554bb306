"""Grammars of arguments that are no JSON object: their order, and the notations of values."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import GEMMA, HELD, LFM2, CallFormat
from test_serve_grammar import mask_of
from test_serve_parsing import read

from lowtide.errors import UsageError
from lowtide.parsing.schema_types import SchemaTypes
from lowtide.parsing.tools import Tool
from lowtide.serve.grammar_text import openings

INTEGER, STRING = {"type": "integer"}, {"type": "string"}
named = pytest.mark.parametrize("form", HELD, ids=lambda form: form.name)


def tool_of(
    properties: dict[str, Any], required: tuple[str, ...] = (), strict: bool = False
) -> Tool:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return Tool("f", "", schema, strict=strict)


def is_taken(form: CallFormat, tool: Tool, text: str) -> bool:
    """True if a grammar of this tool's call accepts the whole text."""
    mask = mask_of(None, form, tools=(tool,), tool_choice="f", parallel_calls=False)
    for token in form.tokenizer.encode(text):
        if not mask.allowed()[token]:
            return False
        mask.take(token)
    return True


def call(form: CallFormat, *arguments: tuple[str, object]) -> str:
    """Write a call; a name may occur twice."""
    text = form.text(("f", {f"{i}{name}": value for i, (name, value) in enumerate(arguments)}))
    for i, (name, _) in enumerate(arguments):
        text = text.replace(f"{i}{name}", name, 1)
    return text


@named
def test_arguments_come_in_any_order(form: CallFormat) -> None:
    values: dict[str, object] = {"pp": 7, "qq": "x", "rr": [8]}
    schemas = {"pp": INTEGER, "qq": STRING, "rr": {"type": "array", "items": INTEGER}}
    tool = tool_of(schemas, ("qq",))
    for num in range(1, 4):
        for names in itertools.permutations(values, num):
            text = call(form, *((name, values[name]) for name in names))
            assert is_taken(form, tool, text) is ("qq" in names)
            if "qq" in names:
                [(_, _, arguments)] = read(form.tokenizer, text, (tool,))
                assert json.loads(arguments) == {name: values[name] for name in names}
    assert not is_taken(form, tool, call(form, ("qq", "x"), ("qq", "y")))
    assert not is_taken(form, tool, call(form, ("qq", "x"), ("ss", "y")))
    assert is_taken(form, tool_of(schemas), form.text(("f", {})))


@named
def test_many_arguments_keep_their_order(form: CallFormat) -> None:
    names = [f"p{i:02}" for i in range(70)]
    tool = tool_of(dict.fromkeys(names, INTEGER), ("p03", "p68"))
    some = ("p03", "p68", "p01") if form in (LFM2, GEMMA) else ("p01", "p03", "p68")
    assert is_taken(form, tool, call(form, *((name, 1) for name in some)))
    assert not is_taken(form, tool, call(form, ("p03", 1), ("p01", 1)))


def nested_lists(schema: dict[str, Any], depth: int = 7) -> dict[str, Any]:
    return schema if not depth else {"type": "array", "items": nested_lists(schema, depth - 1)}


FULL = {"enum": ["x" * 90_000]}
WIDE = {f"q{i}": {"type": "boolean"} for i in range(900)}
LARGE: dict[str, dict[str, Any]] = {
    "many": {f"p{i:040}": {"type": ["string", "object"]} for i in range(5000)},
    "many that share a wide one": {
        f"p{i}": {"type": "object", "properties": WIDE, "required": list(WIDE)} for i in range(40)
    },
    "lists of lists": {f"p{i}": nested_lists(FULL) for i in range(3)},
    "choices": {f"p{i}": FULL for i in range(40)},
}


@named
@pytest.mark.parametrize("kind", LARGE)
def test_a_grammar_that_is_too_long_is_not_written(kind: str, form: CallFormat) -> None:
    """From a schema of a few hundred kB one could be of gigabytes."""
    with pytest.raises(UsageError, match="at most 262144 are accepted"):
        openings(form.tokenizer, [tool_of(LARGE[kind])], is_single=False)


def test_a_schema_is_copied_for_no_object_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(SchemaTypes, "whole")
    defs = {"inner": {"type": "object", "properties": {"b": INTEGER}, "required": ["b"]}}
    outer = {"type": "object", "properties": {"a": {"$ref": "#/$defs/inner"}}, "required": ["a"]}
    schema = {"type": "object", "properties": {"p": {"$ref": "#/$defs/outer"}}, "required": ["p"]}
    tool = Tool("f", "", {**schema, "$defs": {**defs, "outer": outer}}, strict=True)
    assert is_taken(GEMMA, tool, GEMMA.text(("f", {"p": {"a": {"b": 1}}})))
    assert not is_taken(GEMMA, tool, GEMMA.text(("f", {"p": {"a": {"b": "x"}}})))


@named
def test_arguments_of_any_name(form: CallFormat) -> None:
    tool = Tool("f", "", {"type": "object"})
    text = form.text(("f", {"one": 1, "two": [True, None], "three": {"a": "b"}}))
    if form is not LFM2:  # there values are held to JSON: Python's words stand alone
        assert is_taken(form, tool, text)
    assert is_taken(form, tool, form.text(("f", {"one": 1, "two": "x"})))


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize(
    ("schema", "written", "is_right"),
    [
        (STRING, '"a\\n"', True),
        (STRING, "'a'", False),
        (STRING, "1", False),
        (INTEGER, "12", True),
        (INTEGER, "1.5", False),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", True),
        ({"type": "boolean"}, "None", False),
        ({"type": ["integer", "null"]}, "None", True),
        ({"enum": ["a", None]}, "None", True),
        ({"enum": ["a", 1]}, "'a'", False),
        ({"type": "array", "items": STRING}, '["a", "b"]', True),
        ({"type": "array", "items": STRING}, "[1]", False),
    ],
)
def test_values_as_python_writes_them(
    schema: dict[str, Any], written: str, is_right: bool, is_strict: bool
) -> None:
    tool = tool_of({"a": schema}, ("a",), is_strict)
    text = f"<|tool_call_start|>[f(a={written})]<|tool_call_end|>"
    is_right |= not is_strict and schema is STRING and written == "'a'"
    assert is_taken(LFM2, tool, text) is is_right


def test_blanks_between_arguments_and_calls_may_be_left_out() -> None:
    tool = tool_of({"a": INTEGER, "b": INTEGER})
    mask = mask_of(None, LFM2, tools=(tool,), tool_choice="f")
    for token in LFM2.tokenizer.encode("<|tool_call_start|>[f(b=1,a=2),f(a=3, b=4)]"):
        assert mask.allowed()[token]
        mask.take(token)


ITEM = {
    "type": "object",
    "properties": {"name": STRING, "n": {"type": "integer", "minimum": 3}},
    "required": ["name"],
}
Q = '<|"|>'


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize(
    ("schema", "written", "is_right"),
    [
        (STRING, f'{Q}a "b" {{c}}{Q}', True),
        (STRING, "a", False),
        (INTEGER, "-3", True),
        (INTEGER, f"{Q}3{Q}", False),
        ({"type": ["string", "null"]}, "null", True),
        ({"type": ["string", "null"]}, f"{Q}{Q}", True),
        ({"enum": ["a b", 2, None]}, f"{Q}a b{Q}", True),
        ({"enum": ["a b", 2, None]}, "2", True),
        ({"enum": ["a b", 2, None]}, "3", False),
        ({"type": "array", "items": STRING}, f"[{Q}a{Q},{Q}b{Q}]", True),
        ({"type": "array", "items": STRING}, "[]", True),
        ({"type": "array", "items": STRING}, "[1]", False),
        (ITEM, f"{{name:{Q}a{Q},n:4}}", True),
        (ITEM, f"{{n:4,name:{Q}a{Q}}}", True),
        (ITEM, "{n:4}", False),
        ({"type": "array", "items": ITEM}, f"[{{name:{Q}a{Q}}},{{name:{Q}b{Q},n:3}}]", True),
        ({"$ref": "#/$defs/item"}, f"{{name:{Q}a{Q},n:5}}", True),
        ({"$ref": "#/$defs/item"}, f"{{name:{Q}a{Q},n:x}}", False),
        ({}, f"[{{a:{{b:[1,{Q}c{Q}]}}}},null,true]", True),
        ({}, "[", False),
    ],
)
def test_values_as_gemma_writes_them(
    schema: dict[str, Any], written: str, is_right: bool, is_strict: bool
) -> None:
    parameters = {"properties": {"a": schema}, "required": ["a"], "$defs": {"item": ITEM}}
    tool = Tool("f", "", {"type": "object", **parameters}, strict=is_strict)
    text = f"<|tool_call>call:f{{a:{written}}}<tool_call|>"
    assert is_taken(GEMMA, tool, text) is is_right


def test_what_a_strict_schema_says_of_gemma_s_values() -> None:
    def taken(schema: dict[str, Any], written: str, strict: bool = True) -> bool:
        text = f"<|tool_call>call:f{{a:{written}}}<tool_call|>"
        return is_taken(GEMMA, tool_of({"a": schema}, ("a",), strict), text)

    pattern = {"type": "string", "pattern": "^a+$"}
    assert taken(pattern, f"{Q}aa{Q}") and not taken(pattern, f"{Q}ab{Q}")
    assert taken(pattern, f"{Q}ab{Q}", strict=False)
    two = {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 3}
    assert [taken(two, f"[{','.join('1' * n)}]") for n in range(5)] == [False] * 2 + [True] * 2 + [
        False
    ]
    assert not taken({"type": "integer", "minimum": 3}, "2")
    for schema in (
        {"type": "array", "uniqueItems": True},
        {"type": "array", "prefixItems": [STRING]},
        {"type": "object", "patternProperties": {"a": STRING}},
        {"type": "object", "properties": {}, "anyOf": [ITEM, {"type": "object"}]},
    ):
        with pytest.raises(UsageError, match="cannot be kept to in this form"):
            taken(schema, "[]")
        assert isinstance(taken(schema, "[]", strict=False), bool)
    deep: dict[str, Any] = {"type": "array", "items": {"$ref": "#/properties/a"}}
    assert taken(deep, "[[],[]]", strict=False)
    with pytest.raises(UsageError, match="nested more than"):
        taken(deep, "[]")


TEXTS = st.text('ab<>/"{}[](),:=\n \\\u00e9', max_size=12)


@examples(60)
@given(first=TEXTS, second=TEXTS, form=st.sampled_from(HELD))
def test_what_the_grammar_takes_is_read_as_it_was_written(
    first: str, second: str, form: CallFormat
) -> None:
    tool = tool_of({"first": STRING, "second": STRING}, ("first", "second"))
    arguments: dict[str, object] = {"second": second, "first": first}
    text = form.text(("f", arguments))
    assert is_taken(form, tool, text)
    [(_, _, found)] = read(form.tokenizer, text, (tool,))
    assert json.loads(found) == arguments
