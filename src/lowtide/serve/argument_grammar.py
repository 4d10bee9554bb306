"""Grammars of a call's arguments, in each notation that models have for them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from lowtide.errors import UsageError
from lowtide.parsing.call_form import CallForm, Notation, literal
from lowtide.parsing.call_json import only_text
from lowtide.parsing.literal_text import GEMMA_QUOTE
from lowtide.parsing.schema_types import ALL_KINDS, SchemaTypes
from lowtide.parsing.tools import Tool
from lowtide.serve.exact_integers import check_integers
from lowtide.serve.lark_text import LarkText
from lowtide.serve.quoted_lark import quoted_lark
from lowtide.serve.text_pattern import text_pattern

_LINE = r'("\n")?'

_NESTED = 8
"""Deepest level of a schema that Gemma's notation is held to; deeper values may be any."""

_SCALARS = ("integer", "number", "boolean", "null")
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_NOT_HELD = {
    "array": ("prefixItems", "contains", "uniqueItems", "unevaluatedItems"),
    "object": ("patternProperties", "minProperties", "maxProperties", "propertyNames"),
}
"""Keywords that Gemma's notation is not held to, by type."""


def arguments_grammar(lark: LarkText, form: CallForm, tool: Tool) -> str:
    """Write the grammar of a call's arguments; JSON's are in any order.

    Raises UsageError for a strict tool with a schema that this notation's grammar cannot enforce.
    """
    if form.notation is Notation.XML:
        return _xml_arguments(lark, form, tool)
    if form.notation is Notation.PYTHON:
        return _python_arguments(lark, tool)
    if form.notation is Notation.GEMMA:
        return _gemma_arguments(lark, form, tool)
    return json_arguments(lark, tool)


def json_arguments(lark: LarkText, tool: Tool) -> str:
    """Write a JSON object, its members in the schema's order."""
    name, quoted = only_text(tool), quoted_lark(tool.grammar)
    if not tool.grammar or name is None or quoted is None:
        return lark.schema({"type": "object", **tool.parameters}, is_lenient=not tool.strict)
    head, tail = literal(f'{{{json.dumps(name)}: "'), literal('"}')
    return f"{head} {lark.grammar(quoted)} {tail}"


# raw values between tags


def _xml_arguments(lark: LarkText, form: CallForm, tool: Tool) -> str:
    types = SchemaTypes(tool.parameters)
    if not types.names_members():
        name = rf"/[^{form.xml.parameter_name_end[0]}\n]+/"
        any_text = _raw_text(lark, form, "TEXT")
        return f"({_before_value(form, name)} {any_text})*"
    required = types.required()

    def parts() -> Iterator[tuple[str, bool]]:
        for name, schema in types.parameters().items():
            head = _before_value(form, literal(name))
            if tool.grammar and name == only_text(tool):
                value = f"{lark.grammar(tool.grammar)} {_value_end(form)} {_after_value(form)}"
            else:
                value = _raw_value(lark, form, types, schema, tool.strict)
            yield f"{head} {value}", name in required

    return lark.in_any_order(parts())


def _before_value(form: CallForm, name: str) -> str:
    """Write what precedes a value; name: the grammar of the parameter's name."""
    ends = [f"{each}>" for each in form.xml.parameter_name_end.removesuffix(">").split("><")]
    ends[1:] = [f"<{each}" for each in ends[1:]]
    line = literal("\n") if form.xml.is_padded else ""
    tags = f" {_LINE} ".join(form.mark(each) for each in ends)
    return f"{form.mark(form.xml.parameter)} {name} {tags} {line}"


def _value_end(form: CallForm) -> str:
    """Write the mark after a value, at which raw text ends."""
    end = form.xml.parameter_end
    return literal(f"\n{end}\n") if form.xml.is_padded else form.mark(end)


def _after_value(form: CallForm) -> str:
    return "" if form.xml.is_padded else _LINE


def _raw_value(
    lark: LarkText, form: CallForm, types: SchemaTypes, schema: object, is_strict: bool
) -> str:
    """Write a raw value and its end.

    is_strict: raises UsageError for a schema that a text cannot be held to.
    """
    kind, end = types.of(schema), f"{_value_end(form)} {_after_value(form)}"
    if not kind.is_text or kind.kinds == ALL_KINDS:
        return f"{_of_schema(lark, types, schema, is_strict)} {end}"
    if kind.choices:
        told = (one if isinstance(one, str) else json.dumps(one) for one in kind.choices)
        return f"({' | '.join(map(literal, told))}) {end}"
    pattern = text_pattern(types, schema) if is_strict else ""
    return _raw_text(lark, form, f"TEXT & {pattern}" if pattern else "TEXT")


def _raw_text(lark: LarkText, form: CallForm, terminals: str) -> str:
    """Write a raw text of some terminals and its end."""
    end = _value_end(form)
    return f"{_text_before(lark, end, terminals)} {_after_value(form)}"


def _text_before(lark: LarkText, end: str, terminals: str) -> str:
    """Write a text of some terminals up to an end, which is a token or the first such letters."""
    if end.startswith("<["):
        return f"{terminals if terminals == 'TEXT' else lark.terminal(terminals)} {end}"
    if terminals != "TEXT":
        letters = re.escape(json.loads(end)).replace("/", r"\/").replace("\n", "n")
        terminals = lark.terminal(rf"{terminals} & ~/(.|\n)*{letters}(.|\n)*/")
    return lark.rule(f"{terminals} {end}", "[lazy]")


def _of_schema(lark: LarkText, types: SchemaTypes, schema: object, is_strict: bool) -> str:
    """Write the JSON of a part of a schema."""
    whole = types.whole(schema)
    return lark.schema(whole if isinstance(whole, Mapping) else {}, is_lenient=not is_strict)


# LFM2's


def _python_arguments(lark: LarkText, tool: Tool) -> str:
    types, separator = SchemaTypes(tool.parameters), "/, ?/"
    quoted, text_name = quoted_lark(tool.grammar), only_text(tool)
    if tool.grammar and text_name is not None and quoted is not None:
        return f"{literal(text_name + '=' + chr(34))} {lark.grammar(quoted)} {literal(chr(34))}"
    if not types.names_members():
        one = f'/[A-Za-z_][A-Za-z_0-9]*/ "=" {_python_value(lark, types, {}, False)}'
        return f"({one} ({separator} {one})*)?"
    required = types.required()
    parts = (
        (
            f"{literal(f'{name}=')} {_python_value(lark, types, schema, tool.strict)}",
            name in required,
        )
        for name, schema in types.parameters().items()
    )
    return lark.in_any_order(parts, separator)


def _python_value(lark: LarkText, types: SchemaTypes, schema: object, is_strict: bool) -> str:
    """Write a value as JSON or, where that is the same value, with Python's words and quotes."""
    kind, options = types.of(schema), [_of_schema(lark, types, schema, is_strict)]
    if kind.choices is None and "boolean" in kind.kinds:
        options += ['"True"', '"False"']
    if "null" in kind.kinds and (kind.choices is None or None in kind.choices):
        options.append('"None"')
    if kind.choices is None and kind.is_text and not is_strict:
        options.append(r"/'([^'\\\n]|\\[^\n])*'/")
    return f"({' | '.join(options)})"


# Gemma 4's


def _gemma_arguments(lark: LarkText, form: CallForm, tool: Tool) -> str:
    writer = _Gemma(lark, form, tool.strict)
    text_name = only_text(tool)
    if tool.grammar and text_name is not None:
        quote = form.mark(GEMMA_QUOTE)
        return f"{literal(f'{text_name}:')} {quote} {lark.grammar(tool.grammar)} {quote}"
    return writer.members(SchemaTypes(tool.parameters), 0)


class _Gemma:
    """Writer of grammars of Gemma 4's notation, in which strings are raw between marks."""

    def __init__(self, lark: LarkText, form: CallForm, is_strict: bool) -> None:
        self._lark, self._quote, self._is_strict = lark, form.mark(GEMMA_QUOTE), is_strict
        self._any = ""

    def members(self, types: SchemaTypes, depth: int) -> str:
        """Write the members of an object without its brackets."""
        if not types.names_members():
            one = rf'/[^\s:,<>|"\[\]{{}}]+/ ":" {self.any_value()}'
            return f'({one} ("," {one})*)?'
        required = types.required()
        parts = (
            (f"{literal(f'{name}:')} {self._value(types, schema, depth)}", name in required)
            for name, schema in types.parameters().items()
        )
        return self._lark.in_any_order(parts, '","')

    def any_value(self) -> str:
        """Write a value without a schema."""
        if not self._any:
            self._any = name = self._lark.later()
            scalar = self._lark.schema({"type": list(_SCALARS)}, is_lenient=True)
            one = rf'/[^\s:,<>|"\[\]{{}}]+/ ":" {name}'
            listed = f'"[" ({name} ("," {name})*)? "]"'
            members = f'"{{" ({one} ("," {one})*)? "}}"'
            self._lark.define(name, f"{self._text('TEXT')} | {scalar} | {listed} | {members}")
        return self._any

    def _value(self, types: SchemaTypes, schema: object, depth: int) -> str:
        kind = types.of(schema)
        if kind.kinds == ALL_KINDS and kind.choices is None:
            return self.any_value()
        if depth == _NESTED:
            if self._is_strict:
                raise UsageError(f"strict: a value is nested more than {_NESTED} deep.")
            return self.any_value()
        if kind.choices is not None:
            if self._is_strict:
                check_integers(dict(types.keywords(schema, ("const", "enum"))))
            return f"({' | '.join(self._constant(each) for each in kind.choices)})"
        options = []
        if kind.is_text:
            pattern = text_pattern(types, schema) if self._is_strict else ""
            options.append(self._text(f"TEXT & {pattern}" if pattern else "TEXT"))
        if scalars := [each for each in _SCALARS if each in kind.kinds]:
            bounds = dict(types.keywords(schema, _OF_NUMBERS))
            options.append(self._lark.schema({**bounds, "type": scalars}, not self._is_strict))
        if "array" in kind.kinds:
            options.append(self._list(types, schema, depth))
        if "object" in kind.kinds:
            self._check(types, schema, "object")
            inner = self.members(types.inside(schema), depth + 1)
            options.append(f'"{{" {inner} "}}"')
        return f"({' | '.join(options)})"

    def _list(self, types: SchemaTypes, schema: object, depth: int) -> str:
        self._check(types, schema, "array")
        words = dict(types.keywords(schema, ("items", "minItems", "maxItems")))
        one = self._lark.rule(self._value(types, words.get("items", {}), depth + 1))
        least, most = words.get("minItems", 0), words.get("maxItems")
        if not self._is_strict or not isinstance(least, int):
            least, most = 0, None
        if most == 0:
            return '"[" "]"'
        more = f"{{{max(least - 1, 0)},{'' if not isinstance(most, int) else most - 1}}}"
        listed = f'{one} ("," {one}){more}'
        return f'"[" {listed if least else f"({listed})?"} "]"'

    def _check(self, types: SchemaTypes, schema: object, kind: str) -> None:
        """Raise UsageError for keywords that a strict schema is not held to."""
        names = [*_NOT_HELD[kind], *(["anyOf", "oneOf"] if kind == "object" else [])]
        found = [name for name, _ in types.keywords(schema, names)] if self._is_strict else []
        if found:
            raise UsageError(f"strict: {found[0]} of an {kind} cannot be kept to in this form.")

    def _text(self, terminals: str) -> str:
        return f"{self._quote} {_text_before(self._lark, self._quote, terminals)}"

    def _constant(self, value: object) -> str:
        if isinstance(value, str):
            return f"{self._quote} {literal(value)} {self._quote}"
        if isinstance(value, Mapping):
            return self._joined("{", [f"{literal(f'{k}:')} {self._constant(v)}" for k, v in
                                      sorted(value.items())], "}")  # fmt: skip
        if isinstance(value, list):
            return self._joined("[", [self._constant(each) for each in value], "]")
        return literal(json.dumps(value))

    @staticmethod
    def _joined(begin: str, parts: Sequence[str], end: str) -> str:
        inside = ' "," '.join(parts)
        return f'"{begin}" {inside} "{end}"'
