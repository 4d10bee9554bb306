"""Read and check tool calls that models write as JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from lowtide.files import long_json
from lowtide.parsing.schema_types import TEXT, SchemaTypes
from lowtide.parsing.tools import Tool

NAME = r"[\w.:/-]{1,256}"
"""Regular expression of a function's name."""


def key_pattern(usual: str, names: Iterable[str]) -> str:
    """Build the pattern of a parameter's name: one of `names`, or what `usual` matches.

    names: from a tool's schema. Its grammar has the model write them unchanged, whatever characters
    they have.
    """
    others = {name for name in names if re.fullmatch(usual, name) is None}
    longest_first = map(re.escape, sorted(others - {""}, key=len, reverse=True))
    return "|".join([*longest_first, usual, *[""] * ("" in others)])


class Call(NamedTuple):
    """A call that was read. arguments: a JSON object as text."""

    name: str
    arguments: str


class NotFinite(ValueError):
    """A number that is not finite.

    Python reads NaN, Infinity and 1e999, but would not write them as JSON.
    """


def is_name(value: object) -> bool:
    """Return True for a valid function name; the client decides if the function exists."""
    return isinstance(value, str) and re.fullmatch(NAME, value) is not None


def parse_json(text: str | bytes) -> Any:
    """Parse JSON as `json.loads` does, but raise NotFinite for numbers that are not finite."""
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    return long_json.parse_json(text, _finite)


def parsed(text: str) -> object:
    """Parse JSON; return None if it is invalid."""
    try:
        return parse_json(text)
    except (ValueError, RecursionError):
        return None


def json_text(value: object) -> str:
    """Write a JSON value as text; lone surrogates stay escaped."""
    text = long_json.write_json(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return long_json.write_json(value)
    return text


def call_of(value: object, tools: Mapping[str, Tool]) -> Call | None:
    """Read a call from a JSON object with a name and arguments. tools: by name.

    Arguments given as a string hold JSON, or else the text of a tool with a single string
    parameter.
    """
    if not isinstance(value, Mapping) or not is_name(value.get("name")):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    name, is_text = value["name"], isinstance(arguments, str)
    if is_text and not isinstance(inside := parsed(arguments), Mapping):
        only = None if name not in tools else only_text(tools[name])
        arguments = arguments if only is None else {only: arguments}
    elif is_text:
        arguments = inside
    is_call = is_text or isinstance(arguments, Mapping)
    return Call(name, json_text(arguments)) if is_call else None


def arguments_text(text: str, tool: Tool | None) -> str | None:
    """Read arguments written on their own; return None if they are invalid.

    For a tool with a single string parameter, text that is not a JSON object is that string.
    """
    value = parsed(text) if text.strip() else {}
    if isinstance(value, Mapping):
        return json_text(value)
    name = None if tool is None else only_text(tool)
    return None if name is None else json_text({name: text})


def only_text(tool: Tool) -> str | None:
    """Return the name of a tool's only parameter if that is a string."""
    types = SchemaTypes(tool.parameters)
    members = types.parameters()
    if len(members) != 1:
        return None
    [(name, schema)] = members.items()
    return name if types.of(schema) == TEXT else None


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise NotFinite(f"{text:.40} is not a finite number")
    return number
