"""A tool call that is told while it is written: its name, then its arguments as they come."""

from __future__ import annotations

import re

from lowtide.parsing.call_json import json_text, only_text
from lowtide.parsing.piece_writer import PieceWriter
from lowtide.parsing.tools import Tool

_CLOSERS = " \t\r\n}]`,"  # what may stand between a call's JSON and the mark that ends it


def begins_arguments(text: str, tool: Tool | None) -> bool:
    """Whether a text is certain to begin with the JSON object that is a tool's arguments.

    A tool of one text may be called with that text as it is, and a brace may begin it: JSON is
    certain there from the parameter's name on.
    """
    name = None if tool is None else only_text(tool)
    begin = r"\{" if name is None else rf"\{{\s*{re.escape(json_text(name))}\s*:"
    return re.match(begin, text) is not None


class StreamedCall:
    """Tells one call. is_nested: its arguments stand in a JSON object, which is the call."""

    def __init__(self, out: PieceWriter, call_id: str, name: str, is_nested: bool = False) -> None:
        out.begin_call(call_id, name)
        self._out = out
        self._arguments: _ObjectEnd | None = _ObjectEnd()  # None: they are whole
        self._outer = _ObjectEnd(depth=1) if is_nested else None

    def push(self, text: str) -> str:
        """Takes more of the answer, from the arguments' first brace on, and returns what stands
        behind the call: "" as long as it may go on."""
        rest: str | None = text
        if self._arguments is not None:
            ours, rest = self._arguments.divided(text)
            self._out.arguments(ours)
            if rest is None:
                return ""
            self._arguments = None
        if self._outer is not None and rest is not None:
            _, rest = self._outer.divided(rest)
            if rest is None:
                return ""
            self._outer = None
        return (rest or "").lstrip(_CLOSERS)


class _ObjectEnd:
    """Finds where a JSON object ends that comes in parts. depth: braces that are open already."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._is_string = self._is_escaped = False

    def divided(self, text: str) -> tuple[str, str | None]:
        """What of a text is the object's, and what stands behind it; None: nothing yet."""
        for place, char in enumerate(text, 1):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_string:
                self._is_escaped, self._is_string = char == "\\", char != '"'
            elif char == '"':
                self._is_string = True
            elif char in "{}":
                self._depth += 1 if char == "{" else -1
                if not self._depth:
                    return text[:place], text[place:]
        return text, None
