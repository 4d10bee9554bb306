"""Forms of tool calls in models' text, each with a reader and a grammar.

A model's form is found from its chat template, else from its tokens. Grammars are Lark for
llguidance; `CallForm.mark` and `literal` write the fixed parts.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping

from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.parsing.call_json import NAME, Call, arguments_text, call_of, is_name, parsed
from lowtide.parsing.tools import Tool
from lowtide.parsing.xml_text import FUNCTION, FUNCTION_END

FENCE = "```"

_NAMED = rf'\s*\{{\s*"name"\s*:\s*"({NAME})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
"""Pattern of a call as a JSON object, up to its arguments."""


_MISTRAL_ID = re.compile(r"[0-9A-Za-z]{9}")


def call_form_of(tokenizer: Tokenizer) -> CallForm:
    """Return the form of a model's calls; by default Qwen's, the most common one."""
    forms: tuple[type[CallForm], ...] = (DeepSeekCalls, MistralCalls, TaggedCalls)
    for is_named in (tokenizer.template_names, lambda mark: tokenizer.token_id(mark) is not None):
        for form in forms:
            if is_named(form.begin):
                return form(tokenizer)
    return TaggedCalls(tokenizer)


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def literal(text: str) -> str:
    """Quote a text for a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


class CallForm(ABC):
    """Form of a model's calls: marks, patterns, reader and grammar.

    begin: the mark that begins calls.
    ends: the closing mark for each opening mark, "" if the next call or the answer's end closes it.
    call_end: the mark behind each of several calls.
    inner: other marks within calls.
    may_end_open: the answer's end closes a call, too.
    head: pattern of the text before a call's JSON arguments, from an opening mark or the previous
      call; its first group is the name, and `id` may be another group.
    json_begin: pattern of the text before a call that is all JSON, and its first bracket.
    """

    begin: str
    ends: Mapping[str, str]
    call_end = ""
    inner: tuple[str, ...] = ()
    json_begin = re.compile(r"(?!)")
    may_end_open = False
    has_raw_texts = False  # string arguments are written raw, not as JSON
    bare_begin = ""  # beginning of a call whose first mark was forgotten
    head: re.Pattern[str]

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def token_id(self) -> int | None:
        """Token of the mark that begins a call, or None."""
        return self._tokenizer.token_id(self.begin)

    @property
    def has_token(self) -> bool:
        return self.token_id is not None

    @property
    def marks(self) -> list[str]:
        marks = [*self.ends, *self.ends.values(), *self.inner]
        return [mark for mark in dict.fromkeys(marks) if mark]

    def new_id(self, written: str | None = None) -> str:
        """Make the id of a call that was read; written: the model's own id."""
        return new_call_id()

    def is_value(self, held: str) -> bool:
        """Return True if a mark after this text belongs to a value, although not to a string."""
        return False

    def is_closed(self, held: str, is_cut: bool) -> bool:
        """Return True if the answer's end closes a call; is_cut: it ended at its length limit."""
        return self.may_end_open and not is_cut

    def is_undecided(self, held: str) -> bool:
        """Return True while a begun call may still be JSON or XML."""
        return False

    def is_xml(self, held: str) -> bool:
        """Return True if the begun call is XML."""
        return False

    @abstractmethod
    def is_no_call(self, held: str) -> bool:
        """Return True if a text that begins with a mark of calls can no longer become a call."""

    def mark(self, mark: str) -> str:
        """Write a mark in a grammar: as a token if it is one, else as text."""
        token_id = self._tokenizer.token_id(mark)
        return literal(mark) if token_id is None else f"<[{token_id}]>"

    @abstractmethod
    def read(self, text: str, tools: Mapping[str, Tool]) -> list[Call] | None:
        """Read the calls in a text that runs to the closing mark, or return None if it is no call.

        tools: by name.
        """

    @abstractmethod
    def one(self, tool: Tool, arguments: str) -> str:
        """Write the grammar of one call with the given grammar of arguments."""

    @abstractmethod
    def several(self, one: str, is_single: bool) -> str:
        """Write the grammar of all calls of an answer, each of them `one`."""


class TaggedCalls(CallForm):
    """Qwen, Hermes, Ling: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    Qwen3-Coder writes `<tool_call><function=NAME><parameter=NAME>...` and may forget the first
    mark.
    """

    begin = "<tool_call>"
    end = "</tool_call>"
    head = re.compile(begin + _NAMED)
    json_begin = re.compile(rf"{begin}\s*([\[{{])")

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.has_raw_texts = tokenizer.template_names(FUNCTION)
        self.bare_begin = FUNCTION if self.has_raw_texts else ""
        ends = {self.begin: self.end}
        self.ends = ends | {FUNCTION: FUNCTION_END} if self.has_raw_texts else ends

    def is_undecided(self, held: str) -> bool:
        body = held.removeprefix(self.begin).lstrip()
        return body != FUNCTION and FUNCTION.startswith(body)

    def is_xml(self, held: str) -> bool:
        return held.removeprefix(self.begin).lstrip().startswith(FUNCTION)

    def is_no_call(self, held: str) -> bool:
        body = held.removeprefix(self.begin).lstrip()
        return held.startswith(self.begin) and not (
            body.startswith(("{", "[", FUNCTION)) or FUNCTION.startswith(body)
        )

    def read(self, text: str, tools: Mapping[str, Tool]) -> list[Call] | None:
        body = text.removeprefix(self.begin).removesuffix(self.end).strip()
        call = call_of(parsed(body), tools)
        return None if call is None else [call]

    def one(self, tool: Tool, arguments: str) -> str:
        begin, end = self.mark(self.begin), self.mark(self.end)
        if self.has_raw_texts:
            head, tail = literal(f"{FUNCTION}{tool.name}>\n"), literal(f"{FUNCTION_END}\n")
        else:
            head = literal(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
            tail = literal("}\n")
        return f'{begin} ("\\n")? {head} {arguments} {tail} {end}'

    def several(self, one: str, is_single: bool) -> str:
        return one if is_single else f'{one} ("\\n" {one})*'


class DeepSeekCalls(CallForm):
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
        rf"function{separator}({NAME})\s*\n\s*(?:{FENCE}json)?)\s*(?=\{{)"
    )
    may_end_open = True  # each call has its own end
    _between = re.compile(rf"(?<={one_end})\s*(?={one_begin})")

    def is_value(self, held: str) -> bool:
        """Return True inside a call: its mark ends a text that is no JSON."""
        return self.one_begin in held and not held.rstrip().endswith(self.one_end)

    def is_closed(self, held: str, is_cut: bool) -> bool:
        return held.rstrip().endswith(self.one_end)

    def is_no_call(self, held: str) -> bool:
        body = held.removeprefix(self.begin).lstrip()
        is_begun = body.startswith(self.one_begin) or self.one_begin.startswith(body)
        return held.startswith(self.begin) and not is_begun

    def read(self, text: str, tools: Mapping[str, Tool]) -> list[Call] | None:
        body = text.removeprefix(self.begin).removesuffix(self.end).strip()
        calls = []
        for one in self._between.split(body):
            is_marked = one.startswith(self.one_begin) and one.endswith(self.one_end)
            inside = one.removeprefix(self.one_begin).removesuffix(self.one_end)
            call = self._call(inside, tools) if is_marked else None
            if call is None:
                return None
            calls.append(call)
        return calls

    def one(self, tool: Tool, arguments: str) -> str:
        begin, end = self.mark(self.one_begin), self.mark(self.one_end)
        name, separator = literal(tool.name), self.mark(self.separator)
        if not self._tokenizer.template_names(f"{FENCE}json"):
            return f"{begin} {name} {separator} {arguments} {end}"
        head, tail = literal(f"{tool.name}\n{FENCE}json\n"), literal(f"\n{FENCE}")
        return f'{begin} "function" {separator} {head} {arguments} {tail} {end}'

    def several(self, one: str, is_single: bool) -> str:
        more = "" if is_single else f'("\\n" {one})*'
        return f"{self.mark(self.begin)} {one} {more} {self.mark(self.end)}"

    def _call(self, text: str, tools: Mapping[str, Tool]) -> Call | None:
        name, separator, rest = text.partition(self.separator)
        if name.strip() == "function":
            name, _, rest = rest.partition("\n")
            rest = rest.strip().removeprefix(f"{FENCE}json").removesuffix(FENCE)
        name = name.strip()
        arguments = arguments_text(rest, tools.get(name))
        if not separator or not is_name(name) or arguments is None:
            return None
        return Call(name, arguments)


class MistralCalls(CallForm):
    """Mistral: `[TOOL_CALLS]` and a JSON list of calls.

    Newer models write `[TOOL_CALLS]NAME[ARGS]{...}` for each call.
    """

    begin = "[TOOL_CALLS]"
    arguments, call_id = "[ARGS]", "[CALL_ID]"
    ends = {begin: ""}
    inner = (arguments, call_id)
    head = re.compile(
        rf"(?:\[TOOL_CALLS\]\s*\[?)?{_NAMED}"
        rf"|\[TOOL_CALLS\]\s*({NAME})\s*(?:\[CALL_ID\]\s*(?P<id>\w*)\s*)?(?:\[ARGS\]\s*)?(?=\{{)"
    )
    json_begin = re.compile(r"(?:\[TOOL_CALLS\]\s*|\s*(?!\[TOOL_CALLS\]))([\[{])")
    may_end_open = True  # JSON has its own end
    _no_call = re.compile(
        rf"\[TOOL_CALLS\](?!\s*(?:\Z|[\[{{]|{NAME}\s*(?:\Z|\{{|\[(?:\Z|A\Z|AR|C\Z|CA))))"
    )

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._ids: set[str] = set()  # of this answer

    def new_id(self, written: str | None = None) -> str:
        """Make an id of nine letters and digits, the only form that the templates accept."""
        if written is None or not _MISTRAL_ID.fullmatch(written) or written in self._ids:
            letters = string.ascii_letters + string.digits
            written = "".join(secrets.choice(letters) for _ in range(9))
        self._ids.add(written)
        return written

    def is_no_call(self, held: str) -> bool:
        return self._no_call.match(held) is not None

    def read(self, text: str, tools: Mapping[str, Tool]) -> list[Call] | None:
        body = text.removeprefix(self.begin).strip()
        if body[:1] in ("[", "{"):
            value = parsed(body)
            values = value if isinstance(value, list) else [value]
            calls = [call_of(each, tools) for each in values]
            return None if None in calls else [call for call in calls if call is not None]
        name, separator, rest = body.partition(self.arguments)
        name = name.partition(self.call_id)[0].strip()
        arguments = arguments_text(rest, tools.get(name))
        if not separator or not is_name(name) or arguments is None:
            return None
        return [Call(name, arguments)]

    def one(self, tool: Tool, arguments: str) -> str:
        if self._has_arguments_mark:
            return (
                f"{self.mark(self.begin)} {literal(tool.name)} {self.mark(self.arguments)} "
                f"{arguments}"
            )
        head = literal(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
        return f"{head} {arguments} {literal('}')}"

    def several(self, one: str, is_single: bool) -> str:
        if self._has_arguments_mark:
            return one if is_single else f"({one})+"
        more = "" if is_single else f'(", " {one})*'
        return f'{self.mark(self.begin)} "[" {one} {more} "]"'

    @property
    def _has_arguments_mark(self) -> bool:
        return self._tokenizer.token_id(self.arguments) is not None
