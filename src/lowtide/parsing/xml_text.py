"""The text of one of Qwen3-Coder's calls: `<function=NAME><parameter=NAME>` line by line, the
values as they are.

A value may hold any mark. So a tool's schema says which names begin a parameter, each once, and a
value ends at the last mark before the next one; a mark that was forgotten is not needed.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lowtide.parsing.call_json import Call, is_name, json_text, parse_json
from lowtide.parsing.loose_json import loose_json
from lowtide.parsing.schema_types import ALL_KINDS, ANY, SchemaTypes, ValueType, fits, value_key
from lowtide.parsing.tools import Tool

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"

_FUNCTION_TAG = re.compile(r"<function=[^>\n]*>(?=\s*(?:<parameter=|</function>))|</function>")
_MAX_ENDS = 16
"""Places where one call's values seem to end at which they are read to see whether they do."""

_CLOSERS = {"[": "]", "{": "}"}

_PARAMETER_TAG = re.compile(r"<parameter=([^>\n]+)>")


class _Begin(NamedTuple):
    """A mark that may begin a parameter. is_behind_end: the mark of an end is before it."""

    name: str
    start: int
    end: int
    is_behind_end: bool


def xml_call(text: str, tools: Mapping[str, Tool]) -> Call | None:
    """The call that a text from `<function=` to `</function>` is; None for what is none."""
    name, closed, body = text.removeprefix(FUNCTION).partition(">")
    body = body.removesuffix(FUNCTION_END)
    if not text.startswith(FUNCTION) or not closed or not is_name(name):
        return None
    if not body.lstrip().startswith(PARAMETER):
        return None if body.strip() else Call(name, "{}")
    types = SchemaTypes({} if name not in tools else tools[name].parameters)
    values: dict[str, object] | None = None
    for inside in (_calls_inside(body), []):  # a value may also seem to hold a call
        begins = _begins(body, inside)
        if begins and not body[: begins[0].start].strip():
            values = _Values(body, begins, types).read()
            if types.required() <= values.keys():
                break
    return None if values is None else Call(name, json_text(values))


def _begins(body: str, spans: Sequence[tuple[int, int]]) -> list[_Begin]:
    """Marks of parameters, outside of some parts of the text."""
    starts = [start for start, _ in spans]
    found = []
    for tag in _PARAMETER_TAG.finditer(body):
        place = bisect_left(starts, tag.start()) - 1
        if place < 0 or spans[place][1] <= tag.start():
            before = body[max(0, tag.start() - 64) : tag.start()].rstrip()
            is_behind_end = before.endswith(PARAMETER_END)
            found.append(_Begin(tag[1], tag.start(), tag.end(), is_behind_end))
    return found


def _calls_inside(body: str) -> list[tuple[int, int]]:
    """The places of whole calls in a text, the outermost ones."""
    opened: list[int] = []
    spans: list[tuple[int, int]] = []
    for tag in _FUNCTION_TAG.finditer(body):
        if tag[0] != FUNCTION_END:
            opened.append(tag.start())
        elif opened:
            start = opened.pop()
            while spans and spans[-1][0] > start:
                spans.pop()
            spans.append((start, tag.end()))
    return spans


class _Values:
    """Reads the parameters of one call, from left to right."""

    def __init__(self, body: str, begins: list[_Begin], types: SchemaTypes) -> None:
        self._body, self._begins, self._types = body, begins, types
        self._schemas = types.parameters()
        self._takes_any = not self._schemas or self._types.takes_others()
        self._ends = [tag.start() for tag in re.finditer(re.escape(PARAMETER_END), body)]
        self._lines = [each.start for each in begins if body[each.start - 1 : each.start] == "\n"]
        self._behind_ends = [i for i, each in enumerate(begins) if each.is_behind_end]
        self._values: dict[str, object] = {}
        self._inner_end = -1  # up to here, marks are of the value that is read
        self._num_ends = 0  # places where a value was read to see whether it ends

    def read(self) -> dict[str, object]:
        """The values by name."""
        current, last = self._begins[0], len(self._begins)
        for place in range(1, last):
            if self._is_next(current, place):
                self._take(current, self._begins[place].start)
                current, self._inner_end = self._begins[place], -1
        self._take(current, len(self._body))
        return self._values

    def _take(self, begin: _Begin, end: int) -> None:
        self._values[begin.name] = typed(self._text(begin, end), self._type(begin.name))

    def _text(self, begin: _Begin, end: int) -> str:
        """A parameter's value in a text to `end`, as it is written."""
        text = self._body[begin.end : end]
        if text.rstrip().endswith(PARAMETER_END):  # else it was forgotten
            text = text.rstrip().removesuffix(PARAMETER_END)
        return text.removeprefix("\n").removesuffix("\n")

    def _ends_typed(self, begin: _Begin, end: int) -> bool:
        """Whether a parameter's value in a text to `end` is a whole one of another type than text;
        a value that seems to end again and again is taken not to.
        """
        if self._num_ends == _MAX_ENDS:
            return False
        first = self._body[begin.end : min(end, begin.end + 64)].lstrip()[:1]
        before = self._body[max(begin.end, end - 64) : end].rstrip()
        if first in _CLOSERS and not before.removesuffix(PARAMETER_END).rstrip().endswith(
            _CLOSERS[first]
        ):
            return False
        self._num_ends += 1
        return not isinstance(typed(self._text(begin, end), self._type(begin.name)), str)

    def _type(self, name: str) -> ValueType:
        return self._types.of(self._schemas[name]) if name in self._schemas else ANY

    def _is_next(self, current: _Begin, place: int) -> bool:
        """Whether a mark begins the next parameter behind the current one."""
        found = self._begins[place]
        if found.name in self._values or found.name == current.name:
            return False
        if self._is_free(found):
            return found.is_behind_end or not self._is_inner(current, found, place)
        is_text = current.name in self._schemas and (
            self._type(current.name).is_text or not self._ends_typed(current, found.start)
        )
        return found.is_behind_end and not is_text

    def _is_inner(self, current: _Begin, found: _Begin, place: int) -> bool:
        """Whether a mark without an end before it is of the current value: not at the beginning of
        a line, or there are ends enough for all that begin.
        """
        if not self._type(current.name).is_text:
            return not self._ends_typed(current, found.start)
        if self._body[found.start - 1] != "\n" or found.start < self._inner_end:
            return True
        behind = self._behind_ends[bisect_right(self._behind_ends, place) :]
        later = (begin for begin in map(self._begins.__getitem__, behind) if self._is_free(begin))
        end = next((b.start for b in later if b.name != current.name), len(self._body))
        num_begun = 1 + bisect_left(self._lines, end) - bisect_left(self._lines, current.end)
        num_ended = bisect_left(self._ends, end) - bisect_left(self._ends, current.end)
        self._inner_end = end if num_ended >= num_begun else -1
        return num_ended >= num_begun

    def _is_free(self, begin: _Begin) -> bool:
        """Whether a parameter may be called so that was not read yet."""
        is_known = self._takes_any or begin.name in self._schemas
        return is_known and begin.name not in self._values


def typed(text: str, kind: ValueType) -> object:
    """A value as its schema has it: a text where it may be one and is nothing else."""
    value, is_json = _literal(text, is_loose=not kind.is_text or kind.kinds == ALL_KINDS)
    for choice in kind.choices or ():
        if isinstance(choice, str) and choice == text:
            return choice
    if is_json and kind.choices and value_key(value) in map(value_key, kind.choices):
        return value
    if is_json and (kind.kinds == ALL_KINDS or fits(value, kind.kinds - {"string"})):
        return value
    return text if kind.is_text or not is_json else value


def _literal(text: str, is_loose: bool) -> tuple[object, bool]:
    """What a text is as JSON, and whether it is any."""
    try:
        return (loose_json if is_loose else parse_json)(text), True
    except (ValueError, RecursionError):
        return None, False
