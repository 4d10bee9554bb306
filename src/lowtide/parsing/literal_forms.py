"""Forms of calls whose arguments are literals by name."""

from __future__ import annotations

import re
from collections.abc import Mapping

from lowtide.parsing.call_form import JSON_HEAD, CallForm, Notation, literal
from lowtide.parsing.call_json import NAME, Call, call_of, parsed
from lowtide.parsing.literal_text import NoLiteral, gemma_call, python_calls
from lowtide.parsing.tools import Tool


class PythonCalls(CallForm):
    """LFM2: a list of calls as Python writes them, `[NAME(key="text", n=1)]`, or of JSON."""

    begin, end = "<|tool_call_start|>", "<|tool_call_end|>"
    ends = {begin: end}
    notation = Notation.PYTHON
    may_end_open = True  # a list has its own end
    head = re.compile(rf"(?:{re.escape(begin)}\s*\[?)?{JSON_HEAD}")
    json_begin = re.compile(rf"(?:{re.escape(begin)})?\s*([\[{{])")
    _may_begin = re.compile(
        rf"{re.escape(begin)}\s*(?:\[\s*)?(?:\Z|{{|{NAME}\s*(?:\Z|\())", re.DOTALL
    )

    def is_undecided(self, held: str) -> bool:
        return held.removeprefix(self.begin).strip() in ("", "[")

    def notation_of(self, held: str) -> Notation:
        body = held.removeprefix(self.begin).lstrip().removeprefix("[").lstrip()
        return Notation.JSON if body.startswith("{") else Notation.PYTHON

    def is_no_call(self, held: str) -> bool:
        return held.startswith(self.begin) and self._may_begin.match(held) is None

    def read(self, text: str, tools: Mapping[str, Tool]) -> list[Call] | None:
        body = text.removeprefix(self.begin).removesuffix(self.end).strip()
        if self.notation_of(text) is Notation.JSON:
            value = parsed(body)
            values = value if isinstance(value, list) else [value]
            calls = [call_of(each, tools) for each in values]
            return None if None in calls else [call for call in calls if call is not None]
        try:
            return python_calls(body, tools)
        except NoLiteral:
            return None

    def one(self, tool: Tool, arguments: str) -> str:
        return f'{literal(f"{tool.name}(")} {arguments} ")"'

    def several(self, one: str, is_single: bool) -> str:
        more = "" if is_single else f"(/, ?/ {one})*"
        return f'{self.mark(self.begin)} "[" {one} {more} "]" {self.mark(self.end)}'


class GemmaCalls(CallForm):
    """Gemma 4: `call:NAME{key:<|"|>text<|"|>,n:1}` between marks."""

    begin, end = "<|tool_call>", "<tool_call|>"
    ends = {begin: end}
    notation = Notation.GEMMA
    _may_begin = re.compile(rf"{re.escape(begin)}\s*:?call:\s*(?:\Z|{NAME}\s*(?:\Z|{{))", re.DOTALL)

    def is_undecided(self, held: str) -> bool:
        return not held.removeprefix(self.begin).strip()

    def is_no_call(self, held: str) -> bool:
        body = held.removeprefix(self.begin).lstrip().removeprefix(":")
        return not "call:".startswith(body) and self._may_begin.match(held) is None

    def read(self, text: str, tools: Mapping[str, Tool]) -> list[Call] | None:
        try:
            return [gemma_call(text.removeprefix(self.begin).removesuffix(self.end), tools)]
        except NoLiteral:
            return None

    def one(self, tool: Tool, arguments: str) -> str:
        begin, end = self.mark(self.begin), self.mark(self.end)
        return f'{begin} {literal(f"call:{tool.name}" + "{")} {arguments} "}}" {end}'

    def several(self, one: str, is_single: bool) -> str:
        return one if is_single else f"({one})+"
