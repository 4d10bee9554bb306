"""Reads the texts and JSON values that llama.cpp's tests write in C++."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any

_TOKEN = re.compile(
    r'\s*(?:(?://[^\n]*)|(?:u8)?("(?:[^"\\]|\\[\s\S])*")|(json(?:::array|::object)?)\s*\('
    r"|(true|false|nullptr)|(-?\d+(?:\.\d+)?)|([{}(),]))"
)
_MADE: dict[str, Callable[[Any], Any]] = {"json::array": list, "json::object": dict}
_NAMED = {"true": True, "false": False, "nullptr": None}


def calls_of(source: str, function: str) -> Iterator[list[Any]]:
    """The arguments after the first of a function's calls, of those that are texts and values."""
    for match in re.finditer(rf"\b{function}\(t,", source):
        reader = _Reader(source, match.end())
        arguments = reader.values(")")
        if arguments is not None:
            yield arguments


class _Reader:
    """Owns a place in the source."""

    def __init__(self, source: str, place: int) -> None:
        self._source, self._place = source, place

    def values(self, end: str) -> list[Any] | None:
        """Read values up to a bracket; None if something there is neither text nor value."""
        found: list[Any] = []
        was_text = False
        while match := _TOKEN.match(self._source, self._place):
            self._place = match.end()
            text, made, named, number, mark = match.groups()
            if mark == end:
                return found
            if text is not None:
                value = ast.literal_eval(text)
                found[-1:] = [found[-1] + value] if was_text else [*found[-1:], value]
            elif made is not None:
                inner = self.values(")")
                if inner is None:
                    return None
                one = inner[0] if inner else []
                found.append(_MADE.get(made, lambda value: value)(one))
            elif named is not None:
                found.append(_NAMED[named])
            elif number is not None:
                found.append(ast.literal_eval(number))
            elif mark == "{":
                inner = self.values("}")
                if inner is None:
                    return None
                found.append(_object_or_list(inner))
            elif mark is not None and mark != ",":
                return None
            was_text = text is not None
        return None


def _object_or_list(values: list[Any]) -> Any:
    """Convert a list in braces: an object of pairs whose first is a name, else an array."""
    is_object = all(isinstance(v, list) and len(v) == 2 and isinstance(v[0], str) for v in values)
    return dict(values) if values and is_object else values
