"""Tool calls as models write them in JSON: checked, and told in one form."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from lowtide.files import long_json
from lowtide.parsing.schema_types import TEXT, SchemaTypes
from lowtide.parsing.tools import Tool

NAME = r"[\w.:/-]{1,256}"
"""A regular expression of what a function may be called."""


class Call(NamedTuple):
    """A call that was read. arguments: a JSON object as text."""

    name: str
    arguments: str


class NotFinite(ValueError):
    """A number that is not finite: Python reads NaN, Infinity and 1e999, and what it would write of
    them is not JSON.
    """


def is_name(value: object) -> bool:
    """Whether a function may be called so; whether there is one is the client's to say."""
    return isinstance(value, str) and re.fullmatch(NAME, value) is not None


def parse_json(text: str | bytes) -> Any:
    """As `json.loads`, but raises NotFinite for a number that is not finite."""
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    return long_json.parse_json(text, _finite)


def parsed(text: str) -> object:
    """The value of a JSON text; None for what is not JSON."""
    try:
        return parse_json(text)
    except (ValueError, RecursionError):
        return None


def json_text(value: object) -> str:
    """A JSON value as text; half a surrogate pair stays escaped."""
    text = long_json.write_json(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return long_json.write_json(value)
    return text


def call_of(value: object, tools: Mapping[str, Tool]) -> Call | None:
    """The call that a JSON object with a name and arguments says. tools: by name.

    Arguments that are a text are JSON in it, or else, of a tool of one text, that text.
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
    """The arguments that a model wrote on their own; None for what is none.

    Of a tool of one text, what is no JSON object is that text.
    """
    value = parsed(text) if text.strip() else {}
    if isinstance(value, Mapping):
        return json_text(value)
    name = None if tool is None else only_text(tool)
    return None if name is None else json_text({name: text})


def only_text(tool: Tool) -> str | None:
    """The name of a tool's only parameter, if that is a text."""
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
