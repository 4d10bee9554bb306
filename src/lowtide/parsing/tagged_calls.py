"""Forms of calls between `<tool_call>` marks, and MiniMax's beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.parsing.call_form import JSON_HEAD, CallForm, Notation, literal
from lowtide.parsing.call_json import NAME, Call, call_of, parsed
from lowtide.parsing.tools import Tool
from lowtide.parsing.xml_syntax import CODER, GLM, MINIMAX
from lowtide.parsing.xml_text import xml_call


class TaggedCalls(CallForm):
    """Qwen, Hermes, Ling: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    Qwen3-Coder writes `<tool_call><function=NAME><parameter=NAME>...` and may forget the first
    mark.
    """

    begin = "<tool_call>"
    end = "</tool_call>"
    ends = {begin: end}
    head = re.compile(begin + JSON_HEAD)
    json_begin = re.compile(rf"{begin}\s*([\[{{])")

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        if tokenizer.template_names(CODER.function):
            self.notation, self.bare_begin = Notation.XML, CODER.function
            self.ends = {**self.ends, CODER.function: CODER.function_end}

    def is_undecided(self, held: str) -> bool:
        body = held.removeprefix(self.begin).lstrip()
        return body != CODER.function and CODER.function.startswith(body)

    def notation_of(self, held: str) -> Notation:
        is_xml = held.removeprefix(self.begin).lstrip().startswith(CODER.function)
        return Notation.XML if is_xml else Notation.JSON

    def is_no_call(self, held: str) -> bool:
        body = held.removeprefix(self.begin).lstrip()
        return held.startswith(self.begin) and not (
            body.startswith(("{", "[", CODER.function)) or CODER.function.startswith(body)
        )

    def read(self, text: str, tools: Mapping[str, Tool]) -> list[Call] | None:
        body = text.removeprefix(self.begin).removesuffix(self.end).strip()
        call = call_of(parsed(body), tools)
        return None if call is None else [call]

    def one(self, tool: Tool, arguments: str) -> str:
        begin, end = self.mark(self.begin), self.mark(self.end)
        if self.notation is Notation.XML:
            head = literal(f"{CODER.function}{tool.name}>\n")
            tail = literal(f"{CODER.function_end}\n")
        else:
            head = literal(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
            tail = literal("}\n")
        return f'{begin} ("\\n")? {head} {arguments} {tail} {end}'

    def several(self, one: str, is_single: bool) -> str:
        return one if is_single else f'{one} ("\\n" {one})*'


class GlmCalls(CallForm):
    """GLM: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`.

    Before version 4.7 each part has a line of its own.
    """

    begin, end = GLM.function, GLM.function_end
    ends = {begin: end}
    sign = GLM.parameter
    notation = Notation.XML
    xml = GLM
    head = re.compile(begin + JSON_HEAD)
    json_begin = re.compile(rf"{begin}\s*([\[{{])")
    _may_begin = re.compile(rf"{begin}\s*(?:\Z|[\[{{]|{NAME}\s*(?:\Z|<))")

    def is_undecided(self, held: str) -> bool:
        return not held.removeprefix(self.begin).strip()

    def notation_of(self, held: str) -> Notation:
        body = held.removeprefix(self.begin).lstrip()
        return Notation.JSON if body.startswith(("{", "[")) else Notation.XML

    def is_no_call(self, held: str) -> bool:
        return self._may_begin.match(held) is None

    def read(self, text: str, tools: Mapping[str, Tool]) -> list[Call] | None:
        body = text.removeprefix(self.begin).removesuffix(self.end).strip()
        call = call_of(parsed(body), tools)
        return None if call is None else [call]

    def one(self, tool: Tool, arguments: str) -> str:
        begin, end = self.mark(self.begin), self.mark(self.end)
        return f'{begin} ("\\n")? {literal(tool.name)} ("\\n")? {arguments} {end}'

    def several(self, one: str, is_single: bool) -> str:
        return one if is_single else f'{one} ("\\n"? {one})*'


class MiniMaxCalls(CallForm):
    """MiniMax: `<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>`, each call.

    All calls are between one pair of marks.
    """

    begin, end = MINIMAX.call_begin, MINIMAX.call_end
    ends = {begin: end}
    notation = Notation.XML
    xml = MINIMAX

    def is_undecided(self, held: str) -> bool:
        return not held.removeprefix(self.begin).strip()

    def is_no_call(self, held: str) -> bool:
        body = held.removeprefix(self.begin).lstrip()
        return not (body.startswith(MINIMAX.function) or MINIMAX.function.startswith(body))

    def read(self, text: str, tools: Mapping[str, Tool]) -> list[Call] | None:
        call = xml_call(MINIMAX, text, tools)
        return None if call is None else [call]

    def one(self, tool: Tool, arguments: str) -> str:
        head = literal(f"{MINIMAX.function}{tool.name}{MINIMAX.name_end}")
        return f'{head} ("\\n")? {arguments} {literal(MINIMAX.function_end)} ("\\n")?'

    def several(self, one: str, is_single: bool) -> str:
        calls = one if is_single else f"({one})+"
        return f'{self.mark(self.begin)} ("\\n")? {calls} {self.mark(self.end)}'
