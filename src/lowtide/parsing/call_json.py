"""Tool calls as models write them in JSON: checked, and told in one form."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from lowtide.parsing.schema_types import TEXT, SchemaTypes
from lowtide.parsing.tools import Tool

NAME = r"[\w.:/-]{1,256}"
"""A regular expression of what a function may be called."""

FEW_VALUES = 8192
"""So many values are parsed or written at once, in some milliseconds without Python's lock."""


class Call(NamedTuple):
    """A call that was read. arguments: a JSON object as text."""

    name: str
    arguments: str


class NotFinite(ValueError):
    """A number that is not finite: Python reads NaN, Infinity and 1e999, and what it would write of
    them is not JSON."""


def is_name(value: object) -> bool:
    """Whether a function may be called so; whether there is one is the client's to say."""
    return isinstance(value, str) and re.fullmatch(NAME, value) is not None


def parse_json(text: str | bytes, *, is_long: bool = False) -> Any:
    """As `json.loads`, but raises NotFinite for a number that is not finite.

    is_long: lets other threads run meanwhile, and takes five times as long.
    """
    if not is_long:
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    if text.startswith("\ufeff"):
        raise json.JSONDecodeError("Unexpected UTF-8 BOM", text, 0)
    decoder = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)
    # The library's scanner in C holds Python's lock from the first value to the last.
    decoder.scan_once = json.scanner.py_make_scanner(decoder)  # type: ignore[attr-defined]
    return decoder.decode(text)


def write_json(value: object, *, ensure_ascii: bool = True) -> str:
    """As `json.dumps`, but lets other threads run while it writes many values."""
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii)
    if has_few_values(value):
        return encoder.encode(value)
    return "".join(encoder.iterencode(value))  # in Python


def has_few_values(value: object) -> bool:
    """Whether JSON has no more than `FEW_VALUES` values."""
    num_left, level = FEW_VALUES, [value]
    while level:
        num_left -= len(level)
        below: list[object] = []
        for each in level:
            if isinstance(each, dict | list | tuple):
                if len(each) > num_left:
                    return False
                below.extend(each.values() if isinstance(each, dict) else each)
        level = below
    return num_left >= 0


def parsed(text: str) -> object:
    """The value of a JSON text; None for what is not JSON."""
    try:
        return parse_json(text)
    except (ValueError, RecursionError):
        return None


def json_text(value: object) -> str:
    """A JSON value as text; half a surrogate pair stays escaped."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
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
