"""Qwen3-Coder's calls: `<function=NAME><parameter=NAME>` line by line, the values as they are."""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.parsing.call_json import Call, is_name, json_text, parsed
from lowtide.parsing.tools import Tool

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


def xml_call(text: str, tools: Mapping[str, Tool]) -> Call | None:
    """The call that a text from `<function=` to `</function>` is; None for what is none."""
    name, closed, rest = text.removeprefix(FUNCTION).partition(">")
    if not text.startswith(FUNCTION) or not closed or not is_name(name):
        return None
    types = _types(tools.get(name))
    values: dict[str, object] = {}
    while (rest := rest.lstrip()) != FUNCTION_END:
        is_parameter = rest.startswith(PARAMETER)
        key, closed, rest = rest.removeprefix(PARAMETER).partition(">")
        end = _end_of_value(rest)
        if not is_parameter or not closed or "\n" in key or end < 0:
            return None
        value = rest[:end].removeprefix("\n").removesuffix("\n")
        values[key] = _typed(value, types.get(key, set()))
        rest = rest[end + len(PARAMETER_END) :]
    return Call(name, json_text(values))


def _end_of_value(text: str) -> int:
    """Where the value's end is: a value may speak of one, but only another parameter or the
    function's end follows the real one. -1 for none."""
    end = text.find(PARAMETER_END)
    while end >= 0:
        behind = text[end + len(PARAMETER_END) :].lstrip()
        if behind.startswith(PARAMETER) or behind == FUNCTION_END:
            return end
        end = text.find(PARAMETER_END, end + 1)
    return -1


def _types(tool: Tool | None) -> Mapping[str, set[str]]:
    """What a tool's schema says of its parameters' types."""
    properties = None if tool is None else tool.parameters.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {key: kinds_of(schema) for key, schema in properties.items()}


def kinds_of(schema: object) -> set[str]:
    """The types that a schema names, its alternatives' included."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    kinds = list(kind) if isinstance(kind, list) else [kind]
    for name in ("anyOf", "oneOf"):
        alternatives = schema.get(name)
        for each in alternatives if isinstance(alternatives, list) else ():
            kinds.append(each.get("type") if isinstance(each, Mapping) else None)
    return {each for each in kinds if isinstance(each, str)}


def _typed(text: str, kinds: set[str]) -> object:
    """A value as its schema has it; as a text where it is one, or no JSON."""
    if "string" in kinds and not ("null" in kinds and text == "null"):
        return text
    value = parsed(text)
    return text if value is None and text.strip() != "null" else value
