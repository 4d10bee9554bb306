"""A tool call that is told while it is written: its name, then its arguments as they come."""

from __future__ import annotations

import re

from lowtide.parsing.call_json import json_text, only_text
from lowtide.parsing.json_scan import JsonScan
from lowtide.parsing.piece_writer import PieceWriter
from lowtide.parsing.tools import Tool

_CLOSERS = " \t\r\n}]`,"  # what may stand between a call's JSON and the mark that ends it


def begin_of_arguments(tool: Tool | None) -> re.Pattern[str]:
    """Return what a text begins with that is certain to be the JSON object of a tool's arguments.

    A tool of one text may be called with that text as it is, and a brace may begin it: JSON is
    certain there from the parameter's name on.
    """
    name = None if tool is None else only_text(tool)
    return re.compile(r"\{" if name is None else rf"\{{\s*{re.escape(json_text(name))}\s*:")


class StreamedCall:
    """Tells one call. is_nested: its arguments stand in a JSON object, which is the call."""

    def __init__(self, out: PieceWriter, call_id: str, name: str, is_nested: bool = False) -> None:
        out.begin_call(call_id, name)
        self._out = out
        self._arguments: JsonScan | None = JsonScan()  # None: they are whole
        self._outer = JsonScan(depth=1) if is_nested else None

    @property
    def is_string(self) -> bool:
        """Whether what comes next is of a string: a mark is a part of it."""
        scan = self._arguments or self._outer
        return scan is not None and scan.is_string

    @property
    def is_whole(self) -> bool:
        """Whether its arguments have ended."""
        return self._arguments is None

    def push(self, text: str) -> str:
        """Take more of the answer, from the arguments' first brace on; return what stands behind
        the call: "" as long as it may go on.
        """
        if self._arguments is not None:
            end = self._arguments.end(text)
            self._out.arguments(text[:end])
            if end is None:
                return ""
            self._arguments, text = None, text[end:]
        if self._outer is not None:
            end = self._outer.end(text)
            if end is None:
                return ""
            self._outer, text = None, text[end:]
        return text.lstrip(_CLOSERS)
