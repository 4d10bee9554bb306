"""The forms in which models write tool calls into their text, each both read and made a grammar of.

Which one a model has is seen in its chat template, else in its tokenizer's tokens. Grammars are
Lark as llguidance has it; `CallForm.mark` and `literal` write the fixed parts.
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
"""A call as a JSON object, up to its arguments."""


_MISTRAL_ID = re.compile(r"[0-9A-Za-z]{9}")


def call_form_of(tokenizer: Tokenizer) -> CallForm:
    """The form of a model's calls; Qwen's, the most common one, where nothing says which."""
    forms: tuple[type[CallForm], ...] = (DeepSeekCalls, MistralCalls, TaggedCalls)
    for is_named in (tokenizer.template_names, lambda mark: tokenizer.token_id(mark) is not None):
        for form in forms:
            if is_named(form.begin):
                return form(tokenizer)
    return TaggedCalls(tokenizer)


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def literal(text: str) -> str:
    """A text in a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


class CallForm(ABC):
    """How calls are written. begin: the mark that begins them; ends: the mark that closes each
    one that begins a call, "" where the next or the answer's end does; call_end: the mark behind
    each of several calls; inner: other marks in them. may_end_open: the answer's end closes a call,
    too.

    head: what stands before the JSON object that is a call's arguments, from a mark that begins
    calls or from behind another call; its first group is the name, and `id` may be another.
    json_begin: what stands before JSON that is the call, and its first bracket.
    """

    begin: str
    ends: Mapping[str, str]
    call_end = ""
    inner: tuple[str, ...] = ()
    json_begin = re.compile(r"(?!)")
    may_end_open = False
    has_raw_texts = False  # arguments that are texts are written as they are, not as JSON
    bare_begin = ""  # what a call may begin with where its first mark was forgotten
    head: re.Pattern[str]

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def token_id(self) -> int | None:
        """The mark that begins a call, where it is a token."""
        return self._tokenizer.token_id(self.begin)

    @property
    def has_token(self) -> bool:
        """Whether it is one."""
        return self.token_id is not None

    @property
    def marks(self) -> list[str]:
        """All of them."""
        marks = [*self.ends, *self.ends.values(), *self.inner]
        return [mark for mark in dict.fromkeys(marks) if mark]

    def new_id(self, written: str | None = None) -> str:
        """For a call that was read; written: the model's own."""
        return new_call_id()

    def is_value(self, held: str) -> bool:
        """Whether a mark behind a text is of a value in it, although of no string."""
        return False

    def is_closed(self, held: str, is_cut: bool) -> bool:
        """Whether the answer's end closes a call; is_cut: it is where its length ended."""
        return self.may_end_open and not is_cut

    def is_undecided(self, held: str) -> bool:
        """Whether a call has begun that may be JSON or XML."""
        return False

    def is_xml(self, held: str) -> bool:
        """Whether what has begun is a call as XML."""
        return False

    @abstractmethod
    def is_no_call(self, held: str) -> bool:
        """Whether a text, from the mark that begins a call, is certain not to become one."""

    def mark(self, mark: str) -> str:
        """In a grammar: the token, or where there is none the text."""
        token_id = self._tokenizer.token_id(mark)
        return literal(mark) if token_id is None else f"<[{token_id}]>"

    @abstractmethod
    def read(self, text: str, tools: Mapping[str, Tool]) -> list[Call] | None:
        """The calls in a text to the mark that closes them, in whatever form; None for what is no
        call. tools: by name.
        """

    @abstractmethod
    def one(self, tool: Tool, arguments: str) -> str:
        """A call in a grammar, with what its arguments are."""

    @abstractmethod
    def several(self, one: str, is_single: bool) -> str:
        """All calls of an answer in a grammar, each of them `one`."""


class TaggedCalls(CallForm):
    """Qwen, Hermes, Ling: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, and of
    Qwen3-Coder `<tool_call><function=NAME><parameter=NAME>...`, whose first mark it may forget.
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
        """See `CallForm`."""
        body = held.removeprefix(self.begin).lstrip()
        return body != FUNCTION and FUNCTION.startswith(body)

    def is_xml(self, held: str) -> bool:
        """See `CallForm`."""
        return held.removeprefix(self.begin).lstrip().startswith(FUNCTION)

    def is_no_call(self, held: str) -> bool:
        """See `CallForm`."""
        body = held.removeprefix(self.begin).lstrip()
        return held.startswith(self.begin) and not (
            body.startswith(("{", "[", FUNCTION)) or FUNCTION.startswith(body)
        )

    def read(self, text: str, tools: Mapping[str, Tool]) -> list[Call] | None:
        """See `CallForm`."""
        body = text.removeprefix(self.begin).removesuffix(self.end).strip()
        call = call_of(parsed(body), tools)
        return None if call is None else [call]

    def one(self, tool: Tool, arguments: str) -> str:
        """See `CallForm`."""
        begin, end = self.mark(self.begin), self.mark(self.end)
        if self.has_raw_texts:
            head, tail = literal(f"{FUNCTION}{tool.name}>\n"), literal(f"{FUNCTION_END}\n")
        else:
            head = literal(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
            tail = literal("}\n")
        return f'{begin} ("\\n")? {head} {arguments} {tail} {end}'

    def several(self, one: str, is_single: bool) -> str:
        """See `CallForm`."""
        return one if is_single else f'{one} ("\\n" {one})*'


class DeepSeekCalls(CallForm):
    """`NAME<sep>{...}` between marks of each call and of all; before version 3.1
    `function<sep>NAME` and the arguments as a block of code.
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
        """See `CallForm`: a text that is no JSON ends with its call's mark."""
        return self.one_begin in held and not held.rstrip().endswith(self.one_end)

    def is_closed(self, held: str, is_cut: bool) -> bool:
        """See `CallForm`."""
        return held.rstrip().endswith(self.one_end)

    def is_no_call(self, held: str) -> bool:
        """See `CallForm`."""
        body = held.removeprefix(self.begin).lstrip()
        is_begun = body.startswith(self.one_begin) or self.one_begin.startswith(body)
        return held.startswith(self.begin) and not is_begun

    def read(self, text: str, tools: Mapping[str, Tool]) -> list[Call] | None:
        """See `CallForm`."""
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
        """See `CallForm`."""
        begin, end = self.mark(self.one_begin), self.mark(self.one_end)
        name, separator = literal(tool.name), self.mark(self.separator)
        if not self._tokenizer.template_names(f"{FENCE}json"):
            return f"{begin} {name} {separator} {arguments} {end}"
        head, tail = literal(f"{tool.name}\n{FENCE}json\n"), literal(f"\n{FENCE}")
        return f'{begin} "function" {separator} {head} {arguments} {tail} {end}'

    def several(self, one: str, is_single: bool) -> str:
        """See `CallForm`."""
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
    """`[TOOL_CALLS]` and a JSON list of calls; in newer models `[TOOL_CALLS]NAME[ARGS]{...}`, once
    for each.
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
        """Nine letters and digits: the templates take nothing else."""
        if written is None or not _MISTRAL_ID.fullmatch(written) or written in self._ids:
            letters = string.ascii_letters + string.digits
            written = "".join(secrets.choice(letters) for _ in range(9))
        self._ids.add(written)
        return written

    def is_no_call(self, held: str) -> bool:
        """See `CallForm`."""
        return self._no_call.match(held) is not None

    def read(self, text: str, tools: Mapping[str, Tool]) -> list[Call] | None:
        """See `CallForm`."""
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
        """See `CallForm`."""
        if self._has_arguments_mark:
            return (
                f"{self.mark(self.begin)} {literal(tool.name)} {self.mark(self.arguments)} "
                f"{arguments}"
            )
        head = literal(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
        return f"{head} {arguments} {literal('}')}"

    def several(self, one: str, is_single: bool) -> str:
        """See `CallForm`."""
        if self._has_arguments_mark:
            return one if is_single else f"({one})+"
        more = "" if is_single else f'(", " {one})*'
        return f'{self.mark(self.begin)} "[" {one} {more} "]"'

    @property
    def _has_arguments_mark(self) -> bool:
        return self._tokenizer.token_id(self.arguments) is not None
