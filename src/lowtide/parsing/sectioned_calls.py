"""Forms with a pair of marks around all calls, and another around each."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping

from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.parsing.call_form import CallForm, literal
from lowtide.parsing.call_json import NAME, Call, arguments_text, is_name, parsed
from lowtide.parsing.schema_types import SchemaTypes
from lowtide.parsing.tools import Tool

_FENCE = "```"


class SectionedCalls(CallForm):
    """Form whose arguments are JSON after a separator.

    one_begin, one_end: marks of a call. separator: between the call's name and its arguments.
    """

    end: str
    one_begin: str
    separator: str
    one_end: str
    may_end_open = True  # each call has its own end

    def is_value(self, held: str) -> bool:
        """Return True inside a call: its mark ends a text that is not JSON."""
        return self.one_begin in held and not held.rstrip().endswith(self.one_end)

    def is_closed(self, held: str, is_cut: bool) -> bool:
        return held.rstrip().endswith(self.one_end)

    def is_no_call(self, held: str) -> bool:
        body = held.removeprefix(self.begin).lstrip()
        is_begun = body.startswith(self.one_begin) or self.one_begin.startswith(body)
        return held.startswith(self.begin) and not is_begun

    def read(self, text: str, tools: Mapping[str, Tool]) -> list[Call] | None:
        body = text.removeprefix(self.begin).removesuffix(self.end).strip()
        between = re.compile(rf"(?<={re.escape(self.one_end)})\s*(?={re.escape(self.one_begin)})")
        calls = []
        for one in between.split(body):
            is_marked = one.startswith(self.one_begin) and one.endswith(self.one_end)
            inside = one.removeprefix(self.one_begin).removesuffix(self.one_end)
            call = self._call(inside, tools) if is_marked else None
            if call is None:
                return None
            calls.append(call)
        return calls

    @abstractmethod
    def _call(self, text: str, tools: Mapping[str, Tool]) -> Call | None:
        """Read what stands between the marks of one call."""


class DeepSeekCalls(SectionedCalls):
    """DeepSeek: `NAME<sep>{...}` between marks of each call and of all calls.

    Before version 3.1: `function<sep>NAME` and the arguments as a block of code.
    """

    begin = "<｜tool▁calls▁begin｜>"
    end = "<｜tool▁calls▁end｜>"
    one_begin, separator, one_end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    ends = {begin: end}
    call_end = one_end
    inner = (one_begin, separator, one_end)
    head = re.compile(
        rf"(?:{begin})?\s*{one_begin}(?:\s*({NAME})\s*{separator}|"
        rf"function{separator}({NAME})\s*\n\s*(?:{_FENCE}json)?)\s*(?=\{{)"
    )

    def one(self, tool: Tool, arguments: str) -> str:
        begin, end = self.mark(self.one_begin), self.mark(self.one_end)
        name, separator = literal(tool.name), self.mark(self.separator)
        if not self._tokenizer.template_names(f"{_FENCE}json"):
            return f"{begin} {name} {separator} {arguments} {end}"
        head, tail = literal(f"{tool.name}\n{_FENCE}json\n"), literal(f"\n{_FENCE}")
        return f'{begin} "function" {separator} {head} {arguments} {tail} {end}'

    def several(self, one: str, is_single: bool) -> str:
        more = "" if is_single else f'("\\n" {one})*'
        return f"{self.mark(self.begin)} {one} {more} {self.mark(self.end)}"

    def _call(self, text: str, tools: Mapping[str, Tool]) -> Call | None:
        name, separator, rest = text.partition(self.separator)
        if name.strip() == "function":
            name, _, rest = rest.partition("\n")
            rest = rest.strip().removeprefix(f"{_FENCE}json").removesuffix(_FENCE)
        name = name.strip()
        arguments = arguments_text(rest, tools.get(name))
        if not separator or not is_name(name) or arguments is None:
            return None
        return Call(name, arguments)


class KimiCalls(SectionedCalls):
    """Kimi: `functions.NAME:0<|tool_call_argument_begin|>{...}` for each call.

    The number is that of the call in the conversation, and the whole the call's id. The marks
    around all calls may be forgotten.
    """

    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    one_begin, separator = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
    one_end = "<|tool_call_end|>"
    ends = {begin: end, one_begin: one_end}
    call_end = one_end
    inner = (separator,)
    _prefix = "functions."
    _told = rf"(?!\d+\s*(?:{re.escape(separator)}|\Z))(?:functions\.)?({NAME}?)(?::\d{{1,9}})?\s*"
    head = re.compile(
        rf"(?:{re.escape(begin)})?\s*{re.escape(one_begin)}\s*"
        rf"(?={_told}{re.escape(separator)})(?P<id>[\w.:/-]+)\s*{re.escape(separator)}\s*(?=\{{)"
    )

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._ids: set[str] = set()  # of this answer

    def new_id(self, written: str | None = None) -> str:
        """Return the model's own id, which its next prompt repeats, unless it was used before."""
        if written is None or not re.fullmatch(r"functions\..+:\d+", written):
            return super().new_id()
        is_used = written in self._ids
        self._ids.add(written)
        return super().new_id() if is_used else written

    def one(self, tool: Tool, arguments: str) -> str:
        begin, separator, end = map(self.mark, (self.one_begin, self.separator, self.one_end))
        told = f"{literal(f'{self._prefix}{tool.name}:')} /[0-9]{{1,6}}/"
        return f"{begin} {told} {separator} {arguments} {end}"

    def several(self, one: str, is_single: bool) -> str:
        calls = one if is_single else f"({one})+"
        return f"{self.mark(self.begin)} {calls} {self.mark(self.end)}"

    def _call(self, text: str, tools: Mapping[str, Tool]) -> Call | None:
        told, separator, rest = text.partition(self.separator)
        found = re.fullmatch(self._told, told.strip())
        name = found[1] if found is not None else _only_tool_for(rest, tools)
        arguments = arguments_text(rest, tools.get(name))
        return Call(name, arguments) if separator and is_name(name) and arguments else None


def _only_tool_for(arguments: str, tools: Mapping[str, Tool]) -> str:
    """Return the name of the only tool that has these arguments; "" if there is none or several.

    A model may write a call's number alone.
    """
    given = parsed(arguments)
    if not isinstance(given, dict):
        return ""
    schemas = {name: SchemaTypes(tool.parameters) for name, tool in tools.items()}
    fitting = [
        name
        for name, types in schemas.items()
        if types.required() <= given.keys() <= types.parameters().keys()
    ]
    return fitting[0] if len(fitting) == 1 else ""
