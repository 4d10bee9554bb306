"""Strict tools of models that write texts without quotes: each is of its schema, and read as it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from small_tokenizers import CODER, FORMATS, CallFormat
from test_calls_whole import parameter, xml
from test_serve_grammar import mask_of, taken
from test_serve_parsing import read

from lowtide.errors import UsageError
from lowtide.parsing.tools import Tool
from lowtide.serve.grammar_text import Constraint

DEFINED = {"code": {"type": "string", "pattern": "^[A-Z]{2}$"}, "number": {"type": "integer"}}


def tool_of(schema: object, **more: Any) -> Tool:
    parameters = {"properties": {"a": schema}, "required": ["a"], "$defs": DEFINED, **more}
    return Tool("f", "", {"type": "object", **parameters}, strict=True)


def is_allowed(schema: object, text: str) -> bool:
    """Return True if the grammar lets a value be written; such a value is read as it stands."""
    tool = tool_of(schema)
    mask = mask_of(None, CODER, tools=(tool,), tool_choice="f")
    call = xml(parameter("a", text), name="f")
    if not all(taken(mask, token) for token in CODER.tokenizer.encode(call)):
        return False
    [(kind, _, arguments)] = read(CODER.tokenizer, call, (tool,))
    value = json.loads(arguments)["a"]
    assert kind == "call" and (value == text or text in ("null", json.dumps(value)))
    return True


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"pattern": "^a+$"}, ["a", "aaa"], ["", "b", "aab", "a\na"]),
        ({"pattern": "b/c"}, ["b/c", "ab/c\nd"], ["bc", ""]),
        ({"pattern": "^a"}, ["a", "ab\nc"], ["ba"]),
        ({"pattern": "a$"}, ["a", "ba"], ["ab"]),
        ({"pattern": "^a|b$"}, ["a", "b"], ["c"]),
        ({"minLength": 2, "maxLength": 3}, ["ab", "é😀x", "a\nb"], ["a", "abcd"]),
        ({"maxLength": 2}, ["", "ab"], ["abc"]),
        ({"minLength": 1, "pattern": "^a*$"}, ["a"], ["", "b"]),
        ({"format": "date"}, ["2026-11-28"], ["2026-13-28", "today", ""]),
        ({"format": "date-time"}, ["2026-11-28T15:00:00Z"], ["2026-11-28"]),
        ({"format": "time"}, ["15:00:00+01:00"], ["15:00"]),
        ({"format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
        ({"format": "email"}, ["a.b@c.org"], ["a.b", "a@b@c"]),
        ({"format": "ipv4"}, ["127.0.0.1"], ["256.0.0.1", "1.2.3"]),
        ({"format": "ipv6"}, ["::1", "2001:db8::8:800"], ["1"]),
        ({"format": "hostname"}, ["a-b.org"], ["-a"]),
        ({"format": "uri"}, ["https://a.org/b?c=d#e"], ["a b"]),
        ({"format": "duration"}, ["P1DT2H"], ["1 day"]),
        ({"enum": ["a", "1"]}, ["a", "1"], ["b"]),
    ],
)
def test_a_text_is_of_its_schema(
    schema: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    text = {"type": "string", **schema}
    for form in (
        text,
        {"allOf": [{"type": "string"}, schema]},
        {"anyOf": [text, {"type": "null"}]},
    ):
        assert all(is_allowed(form, each) for each in right)
        assert not any(is_allowed(form, each) for each in wrong)
    assert is_allowed({"anyOf": [text, {"type": "null"}]}, "null")


def test_references_are_followed_in_grammars() -> None:
    assert is_allowed({"$ref": "#/$defs/code"}, "AB")
    assert not is_allowed({"$ref": "#/$defs/code"}, "ab")
    assert is_allowed({"$ref": "#/$defs/number"}, "12")
    assert not is_allowed({"$ref": "#/$defs/number"}, "ab")
    of_list = {
        "type": "array",
        "items": {"$ref": "#/properties/a/$defs/x"},
        "$defs": {"x": {"const": 7}},
    }
    assert is_allowed(of_list, "[7]") and not is_allowed(of_list, "[8]")


def test_what_a_text_cannot_be_held_to_is_refused_by_name() -> None:
    for schema, reason in (
        ({"type": "string", "format": "colour"}, "format 'colour' is not known"),
        ({"type": "string", "maxLength": 10**7}, "length is bounded up to"),
        ({"anyOf": [{"anyOf": [{"type": "string"}]}, {"type": "null"}]}, "have alternatives"),
    ):
        with pytest.raises(UsageError, match=reason):
            is_allowed(schema, "a")


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("minimum", 2**70),
        ("maximum", -(2**63) - 1),
        ("exclusiveMaximum", 2**63),
        ("minimum", 2**53 + 1),
        ("multipleOf", 2**64),
        ("const", 2**64),
        ("enum", [1, 2**70]),
        ("maximum", 1e30),
    ],
)
def test_integers_that_would_not_be_exact_are_refused_by_name(
    form: CallFormat, keyword: str, value: Any
) -> None:
    schema = {"type": "integer", keyword: value}
    with pytest.raises(UsageError, match=rf"{keyword} .* beyond the integers"):
        mask_of(None, form, tools=(tool_of(schema),), tool_choice="f")
    with pytest.raises(UsageError, match=rf"{keyword} .* beyond the integers"):
        mask_of(Constraint.json_schema({"properties": {"a": schema}}), form)


def test_integers_that_are_exact_are_kept_to() -> None:
    assert is_allowed({"type": "integer", "maximum": 2**53}, str(2**53))
    assert not is_allowed({"type": "integer", "maximum": 2**53}, str(2**53 + 1))
    assert is_allowed({"type": "integer", "maximum": 2**63 - 1}, str(2**63 - 1))
    assert not is_allowed({"type": "integer", "maximum": 2**63 - 1}, str(2**63))
    assert is_allowed({"type": "integer", "properties": {"minimum": {"const": 1}}}, "5")


def test_integers_that_would_not_be_exact_are_left_out_where_nothing_is_strict() -> None:
    schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1}
    tool = Tool("f", "", {"properties": {"a": schema}, "required": ["a"]})
    mask = mask_of(None, CODER, tools=(tool,), tool_choice="f")
    call = xml(parameter("a", str(2**63)), name="f")
    assert all(taken(mask, token) for token in CODER.tokenizer.encode(call))
