"""Forms of calls that name each parameter between tags and write its value raw."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from lowtide.parsing.call_json import key_pattern

MAX_NAME_CHARS = 256


@dataclass(frozen=True)
class XmlSyntax:
    """Tags of one form.

    call_begin, call_end: marks around a call, or around all of an answer; "" if `function` and
      `function_end` are the marks.
    function, name_end: texts around a function's name.
    parameter, parameter_name_end: texts around a parameter's name, after which its value begins.
    is_padded: a line break stands on both sides of a value.
    holds_several: one pair of marks holds several calls.
    """

    call_begin: str
    call_end: str
    function: str
    name_end: str
    function_end: str
    parameter: str
    parameter_name_end: str
    parameter_end: str
    is_padded: bool = False
    holds_several: bool = False

    @cached_property
    def head(self) -> re.Pattern[str]:
        """Pattern of the text from the first mark to the function's name, its only group."""
        return re.compile(self._before_function + self._name + re.escape(self.name_end))

    @cached_property
    def part_of_head(self) -> re.Pattern[str]:
        """Pattern of a text that may become a `head`."""
        begun = "".join(f"(?:{re.escape(char)}" for char in self.name_end[:-1])
        closed = ")?" * (len(self.name_end) - 1)
        return re.compile(rf"{self._before_function}{self._name}{begun}{closed}\Z")

    @cached_property
    def tag(self) -> re.Pattern[str]:
        """Pattern of a tag that begins a function, whose name is its group, or ends one."""
        begin = re.escape(self.function) + self._name + re.escape(self.name_end)
        return re.compile(f"{begin}|{re.escape(self.function_end)}")

    @cached_property
    def whole_tag(self) -> re.Pattern[str]:
        """Pattern as `tag`, of functions alone whose body begins."""
        begin = re.escape(self.function) + self._name + re.escape(self.name_end)
        body = "|".join(map(re.escape, self.body_begins))
        return re.compile(rf"{begin}(?=\s*(?:{body}))|{re.escape(self.function_end)}")

    def parameter_tag(self, names: Iterable[str]) -> re.Pattern[str]:
        """Return the pattern of the text before a value; its group is the parameter's name.

        names: of the function's schema, see `key_pattern`.
        """
        end = re.escape(self.parameter_name_end[:1])
        key = key_pattern(rf"[^{end}\n]{{1,{MAX_NAME_CHARS}}}", names)
        name, *after = map(re.escape, self.parameter_name_end.split("><"))
        if after:  # two tags, with blanks between them
            name = rf"{name}>\s*<{after[0]}"
        return re.compile(rf"{re.escape(self.parameter)}({key}){name}")

    @cached_property
    def between(self) -> re.Pattern[str]:
        """Pattern of the text between a call and the next one's function."""
        if not self.call_begin:
            return re.compile(r"\s*")
        begin, end = re.escape(self.call_begin), re.escape(self.call_end)
        several = rf"(?:\s*(?:{end}\s*)?{begin})?" if self.holds_several else rf"\s*{begin}"
        return re.compile(rf"{several}\s*")

    @cached_property
    def end(self) -> re.Pattern[str]:
        """Pattern of the end of a call before the next one."""
        function = re.escape(self.function) + self._name + re.escape(self.name_end)
        last = re.escape(self.call_end)
        last = rf"(?:\s*{last})?" if self.holds_several else rf"\s*{last}"
        return re.compile(
            rf"(?:{re.escape(self.parameter_end)}|{function})\s*{re.escape(self.function_end)}"
            rf"{last}\Z"
        )

    @cached_property
    def loose_ends(self) -> list[re.Pattern[str]]:
        """Patterns that end a call which lacks a mark or seems to open others, likeliest first."""
        value, function, call = map(
            re.escape, (self.parameter_end, self.function_end, self.call_end)
        )
        ends = [rf"{value}\s*+{function}\s*+(?:{call})?", function]
        if call:
            ends.insert(1, rf"(?:{function}|{value})\s*+{call}")
        begins = "|".join(re.escape(each) for each in (self.call_begin, self.function) if each)
        return [re.compile(rf"{end}(?=\s*+(?:\Z|{begins}))") for end in ends]

    @property
    def body_begins(self) -> tuple[str, str]:
        """Texts with which a function's body may begin."""
        return self.parameter, self.function_end

    @property
    def _before_function(self) -> str:
        wrapper = rf"(?:{re.escape(self.call_begin)}\s*)?" if self.call_begin else ""
        return wrapper + re.escape(self.function)

    @property
    def _name(self) -> str:
        if not self.name_end:
            return rf"\s*([\w.:/-]{{1,{MAX_NAME_CHARS}}})"
        return rf"([^{self.name_end[0]}\n]{{0,{MAX_NAME_CHARS}}})"


CODER = XmlSyntax(
    call_begin="<tool_call>",
    call_end="</tool_call>",
    function="<function=",
    name_end=">",
    function_end="</function>",
    parameter="<parameter=",
    parameter_name_end=">",
    parameter_end="</parameter>",
    is_padded=True,
)
GLM = XmlSyntax(
    call_begin="",
    call_end="",
    function="<tool_call>",
    name_end="",
    function_end="</tool_call>",
    parameter="<arg_key>",
    parameter_name_end="</arg_key><arg_value>",
    parameter_end="</arg_value>",
)
MINIMAX = XmlSyntax(
    call_begin="<minimax:tool_call>",
    call_end="</minimax:tool_call>",
    function='<invoke name="',
    name_end='">',
    function_end="</invoke>",
    parameter='<parameter name="',
    parameter_name_end='">',
    parameter_end="</parameter>",
    holds_several=True,
)
