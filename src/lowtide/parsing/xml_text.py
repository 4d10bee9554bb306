"""Read the text of a call with raw values between tags, such as Qwen3-Coder's.

A value may hold any mark. The tool's schema therefore decides which names begin a parameter, each
once, and a value ends at the last closing mark before the next parameter; a missing mark is
tolerated.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from lowtide.parsing.call_json import Call, is_name, json_text, parse_json
from lowtide.parsing.loose_json import loose_json
from lowtide.parsing.schema_types import ALL_KINDS, ANY, SchemaTypes, ValueType, fits, value_key
from lowtide.parsing.tools import Tool
from lowtide.parsing.xml_syntax import XmlSyntax

_MAX_ENDS = 16
"""Most positions in a call at which a value is parsed to test if it ends there."""

_CLOSERS = {"[": "]", "{": "}"}


class _Begin(NamedTuple):
    """A mark that may begin a parameter. is_after_end: a closing mark precedes it."""

    name: str
    start: int
    end: int
    is_after_end: bool


def xml_call(syntax: XmlSyntax, text: str, tools: Mapping[str, Tool]) -> Call | None:
    """Read a call from the first mark to the function's last one; return None if it is none."""
    head = syntax.head.match(text)
    if head is None or not is_name(head[1]):
        return None
    name, body = head[1], text[head.end() :].removesuffix(syntax.function_end)
    if not body.lstrip().startswith(syntax.parameter):
        return None if body.strip() else Call(name, "{}")
    types = SchemaTypes({} if name not in tools else tools[name].parameters)
    names = types.parameters().keys()
    values: dict[str, object] | None = None
    for inside in (_calls_inside(syntax, body), []):  # a value may also seem to hold a call
        begins = _begins(syntax, body, inside, names)
        if begins and not body[: begins[0].start].strip():
            values = _Values(syntax, body, begins, types).read()
            if types.required() <= values.keys():
                break
    return None if values is None else Call(name, json_text(values))


def _begins(
    syntax: XmlSyntax, body: str, spans: Sequence[tuple[int, int]], names: Collection[str]
) -> list[_Begin]:
    """Find the marks of parameters outside of the given spans. names: of the schema."""
    starts = [start for start, _ in spans]
    found = []
    for tag in syntax.parameter_tag(names).finditer(body):
        place = bisect_left(starts, tag.start()) - 1
        if place < 0 or spans[place][1] <= tag.start():
            before = body[max(0, tag.start() - 64) : tag.start()].rstrip()
            is_after_end = before.endswith(syntax.parameter_end)
            name = tag[1] if tag[1] in names else tag[1].strip()
            found.append(_Begin(name, tag.start(), tag.end(), is_after_end))
    return found


def _calls_inside(syntax: XmlSyntax, body: str) -> list[tuple[int, int]]:
    """Return the spans of complete calls in a text, outermost only."""
    opened: list[int] = []
    spans: list[tuple[int, int]] = []
    for tag in syntax.whole_tag.finditer(body):
        if tag[0] != syntax.function_end:
            opened.append(tag.start())
        elif opened:
            start = opened.pop()
            while spans and spans[-1][0] > start:
                spans.pop()
            spans.append((start, tag.end()))
    return spans


class _Values:
    """Reader of one call's parameters, from left to right."""

    def __init__(
        self, syntax: XmlSyntax, body: str, begins: list[_Begin], types: SchemaTypes
    ) -> None:
        self._syntax, self._end = syntax, syntax.parameter_end
        self._body, self._begins, self._types = body, begins, types
        self._schemas = types.parameters()
        self._takes_any = not self._schemas or self._types.takes_others()
        self._ends = [tag.start() for tag in re.finditer(re.escape(self._end), body)]
        self._lines = [each.start for each in begins if body[each.start - 1 : each.start] == "\n"]
        self._after_ends = [i for i, each in enumerate(begins) if each.is_after_end]
        self._values: dict[str, object] = {}
        self._inner_end = -1  # marks up to here belong to the current value
        self._num_ends = 0  # positions at which a value was parsed to test for its end

    def read(self) -> dict[str, object]:
        """Return the values by name."""
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
        """Return a parameter's raw value up to `end`."""
        text = self._body[begin.end : end]
        if text.rstrip().endswith(self._end):  # else it was forgotten
            text = text.rstrip().removesuffix(self._end)
        return text.removeprefix("\n").removesuffix("\n") if self._syntax.is_padded else text

    def _ends_typed(self, begin: _Begin, end: int) -> bool:
        """Return True if a value up to `end` is complete and not a string.

        A value with too many possible ends counts as incomplete.
        """
        if self._num_ends == _MAX_ENDS:
            return False
        first = self._body[begin.end : min(end, begin.end + 64)].lstrip()[:1]
        before = self._body[max(begin.end, end - 64) : end].rstrip()
        if first in _CLOSERS and not before.removesuffix(self._end).rstrip().endswith(
            _CLOSERS[first]
        ):
            return False
        self._num_ends += 1
        return not isinstance(typed(self._text(begin, end), self._type(begin.name)), str)

    def _type(self, name: str) -> ValueType:
        return self._types.of(self._schemas[name]) if name in self._schemas else ANY

    def _is_next(self, current: _Begin, place: int) -> bool:
        """Return True if a mark begins the next parameter."""
        found = self._begins[place]
        if found.name in self._values or found.name == current.name:
            return False
        if self._is_free(found):
            return found.is_after_end or not self._is_inner(current, found, place)
        is_text = current.name in self._schemas and (
            self._type(current.name).is_text or not self._ends_typed(current, found.start)
        )
        return found.is_after_end and not is_text

    def _is_inner(self, current: _Begin, found: _Begin, place: int) -> bool:
        """Return True if a mark without a closing mark before it belongs to the current value.

        It does if it does not begin a line, or if there are enough closing marks for all opening
        ones.
        """
        if not self._type(current.name).is_text:
            return not self._ends_typed(current, found.start)
        if self._body[found.start - 1] != "\n" or found.start < self._inner_end:
            return True
        after = self._after_ends[bisect_right(self._after_ends, place) :]
        later = (begin for begin in map(self._begins.__getitem__, after) if self._is_free(begin))
        end = next((b.start for b in later if b.name != current.name), len(self._body))
        num_begun = 1 + bisect_left(self._lines, end) - bisect_left(self._lines, current.end)
        num_ended = bisect_left(self._ends, end) - bisect_left(self._ends, current.end)
        self._inner_end = end if num_ended >= num_begun else -1
        return num_ended >= num_begun

    def _is_free(self, begin: _Begin) -> bool:
        """Return True if a parameter of this name is allowed and was not read yet."""
        is_known = self._takes_any or begin.name in self._schemas
        return is_known and begin.name not in self._values


def typed(text: str, kind: ValueType) -> object:
    """Convert a raw value to its schema's type; it stays a string if it may only be one."""
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
    """Parse a text as JSON; return the value and whether it is JSON."""
    try:
        return (loose_json if is_loose else parse_json)(text), True
    except (ValueError, RecursionError):
        return None, False
