"""A tool call streamed while it is written: its name, then its arguments."""

from __future__ import annotations

import re

from lowtide.parsing.call_json import json_text, only_text
from lowtide.parsing.json_scan import JsonScan
from lowtide.parsing.piece_writer import PieceWriter
from lowtide.parsing.tools import Tool

_CLOSERS = " \t\r\n}]`,"  # allowed between a call's JSON and its closing mark


def begin_of_arguments(tool: Tool | None) -> re.Pattern[str]:
    """Return a pattern of the text with which a tool's JSON arguments certainly begin.

    A tool with a single string parameter may be given raw text, which may begin with a brace: there
    JSON is certain from the parameter's name on.
    """
    name = None if tool is None else only_text(tool)
    return re.compile(r"\{" if name is None else rf"\{{\s*{re.escape(json_text(name))}\s*:")


class StreamedCall:
    """Writer of one call. is_nested: its arguments are inside a JSON object that is the call."""

    def __init__(self, out: PieceWriter, call_id: str, name: str, is_nested: bool = False) -> None:
        out.begin_call(call_id, name)
        self._out = out
        self._arguments: JsonScan | None = JsonScan()  # None: they are whole
        self._outer = JsonScan(depth=1) if is_nested else None

    @property
    def is_string(self) -> bool:
        """True if the next character is inside a string, where a mark is text."""
        scan = self._arguments or self._outer
        return scan is not None and scan.is_string

    @property
    def is_whole(self) -> bool:
        """True once the arguments have ended."""
        return self._arguments is None

    def push(self, text: str) -> str:
        """Take more of the answer, beginning with the arguments' first brace.

        Returns the text after the call, or "" while the call may continue.
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
