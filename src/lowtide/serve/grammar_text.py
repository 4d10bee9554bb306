"""Writes the grammar of a whole answer in llguidance's Lark: thoughts, text and calls.

The grammar follows the model's own format: thoughts first, calls between their marks, or messages
in channels.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from llguidance import regex_to_lark

from lowtide.errors import UsageError
from lowtide.files.long_json import write_json
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.parsing import has_thoughts, is_thinking
from lowtide.parsing.call_forms import CallForm, call_form_of, literal
from lowtide.parsing.call_json import only_text
from lowtide.parsing.channels import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    FUNCTIONS,
    MESSAGE,
    START,
    has_channels,
)
from lowtide.parsing.inline_calls import THOUGHT_MARKS
from lowtide.parsing.schema_types import ALL_KINDS, SchemaTypes
from lowtide.parsing.tools import Tool
from lowtide.parsing.xml_text import FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END
from lowtide.serve.exact_integers import check_integers, without_inexact
from lowtide.serve.quoted_lark import quoted_lark
from lowtide.serve.text_pattern import text_pattern

BLANKS = r"[ \t\r\n]{1,64}"
"""White space between JSON's parts: without a bound a model may write line breaks to the limit."""


MAX_GRAMMAR_CHARS = 256 << 10
MAX_REGEX_CHARS = 8 << 10
MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Constraint:
    """The required form of an answer's text. Raises UsageError if it is too large.

    kind: json_schema or lark.
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        check_unicode(self.text, self.kind)
        if len(self.text) > MAX_GRAMMAR_CHARS:
            raise UsageError(
                f"The {self.kind} has {len(self.text)} characters; at most {MAX_GRAMMAR_CHARS} are "
                "accepted."
            )

    @classmethod
    def json_schema(cls, schema: object) -> Constraint:
        """Require JSON that fits a schema."""
        if not isinstance(schema, Mapping):
            raise UsageError(f"A JSON schema is an object, not {type(schema).__name__}.")
        check_depth(schema, "The JSON schema")
        return cls("json_schema", write_json(schema))

    @classmethod
    def json_object(cls) -> Constraint:
        """Require any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """Require a text that matches a regular expression, in Rust's syntax, from end to end."""
        if not 0 < len(pattern) <= MAX_REGEX_CHARS:
            raise UsageError(
                f"The regular expression has {len(pattern)} characters; 1 to {MAX_REGEX_CHARS} "
                "are accepted."
            )
        check_unicode(pattern, "regular expression")
        return cls("lark", f"start: /{regex_to_lark(pattern)}/")

    @classmethod
    def lark(cls, grammar: str) -> Constraint:
        """Require a text of a Lark grammar, whose first rule is `start`."""
        return cls("lark", grammar)


class AnswerForm(NamedTuple):
    """The required form of an answer.

    text: form of its text; None: any. tools: may be called; with `must_call` one must be.
    """

    text: Constraint | None
    tools: Sequence[Tool]
    must_call: bool
    is_single: bool  # no more than one call


class LarkText:
    """Collects numbered rules and the other grammars that they use.

    Raises UsageError once they are too long: each of a thousand parameters may bring a copy of the
    schema that it refers to.
    """

    def __init__(self) -> None:
        self._rules = [r"TEXT: /(.|\n)*/"]
        self._others: list[dict[str, str]] = []
        self._num_chars = 0

    def rule(self, body: str, option: str = "") -> str:
        """Add a rule; return its name."""
        self._num_chars += len(body)
        check_length(self._num_chars)
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{option}: {body}")
        return name

    def text_without(self, mark: str) -> str:
        """Return the name of a terminal for text without a mark; for any text if the mark is ""."""
        if not mark:
            return "TEXT"
        return self.terminal(rf"TEXT & ~/(.|\n)*{re.escape(mark)}(.|\n)*/")

    def terminal(self, body: str) -> str:
        """Add a terminal; return its name."""
        name = f"TERMINAL_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def schema(self, schema: Mapping[str, Any], is_lenient: bool = False) -> str:
        """Add a rule for JSON that fits a schema; return its name.

        is_lenient: ignore unsupported keywords. Raises UsageError for integers that the grammar
        cannot enforce exactly.
        """
        if is_lenient:
            schema = without_inexact(schema)
        check_integers(schema)
        options = {"whitespace_pattern": BLANKS, "lenient": is_lenient}
        return self.rule(f"%json {write_json({**schema, 'x-guidance': options})}")

    def grammar(self, lark: str) -> str:
        """Add a complete grammar; return its name."""
        name = f"other_{len(self._others)}"
        self._others.append({"name": name, "lark_grammar": lark})
        return f"@{name}"

    def expression(self, wanted: Constraint | None) -> str:
        """Return the expression that a text must match."""
        if wanted is None:
            return "TEXT"
        if wanted.kind == "json_schema":
            return self.schema(json.loads(wanted.text))
        return self.grammar(wanted.text)

    def whole(self, start: str) -> str:
        """Return all grammars in llguidance's JSON form."""
        lark = "\n".join([f"start: {start}", *self._rules])
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self._others]})


class Opening(NamedTuple):
    """One way in which an optional call may begin, with the call's grammar.

    mark: one token if `token_id` is given, else letters; the grammar then begins with the token
    that contains the first of them. in_header: the mark stands in a channel message's header, else
    in text.
    """

    mark: str
    token_id: int | None
    grammar: str
    in_header: bool = False


def openings(tokenizer: Tokenizer, tools: Sequence[Tool], is_single: bool) -> list[Opening]:
    """Return every way in which a model's calls may begin; text may follow each call."""
    if has_channels(tokenizer):
        return [_header_opening(tokenizer, tools)]
    form = call_form_of(tokenizer)
    found = [_opening(form, tools, is_single)]
    if form.bare_begin:
        found.append(_bare_opening(form, tools))
    return found


def _opening(form: CallForm, tools: Sequence[Tool], is_single: bool) -> Opening:
    lark, begin = LarkText(), form.mark(form.begin)
    arguments = _raw_arguments if form.has_raw_texts else _json_arguments
    ones = [form.one(tool, arguments(lark, tool)) for tool in tools]
    if all(one.startswith(begin) for one in ones):  # each has its own mark
        calls = begin + f"({' | '.join(one.removeprefix(begin) for one in ones)})"
    else:
        calls = form.several(lark.rule(" | ".join(ones)), is_single)
    if form.has_token:
        return Opening(form.begin, form.token_id, lark.whole(calls))
    head = lark.rule(f"TEXT {begin}", "[lazy]")
    return Opening(form.begin, None, lark.whole(head + calls.removeprefix(begin)))


def _bare_opening(form: CallForm, tools: Sequence[Tool]) -> Opening:
    """Return the opening of calls whose first mark a model forgets."""
    lark = LarkText()
    head = lark.rule(f"TEXT {literal(FUNCTION)}", "[lazy]")
    end = literal(FUNCTION_END)
    ones = [
        f"{literal(f'{tool.name}>' + chr(10))} {_raw_arguments(lark, tool)} {end}" for tool in tools
    ]
    return Opening(form.bare_begin, None, lark.whole(f"{head} ({' | '.join(ones)})"))


def _header_opening(tokenizer: Tokenizer, tools: Sequence[Tool]) -> Opening:
    """Return gpt-oss' opening: the header names the function, before or after the channel."""
    lark, to = LarkText(), f"to={FUNCTIONS}"
    channel, constrain, message, call = (
        _mark(tokenizer, mark) for mark in (CHANNEL, CONSTRAIN, MESSAGE, CALL)
    )
    rest = lark.rule(
        f'({channel} ("commentary" | "analysis"))? '
        f'((" ")? {constrain} ("json")? | " json" | " code" | " ")? {message}'
    )
    ones = [f"{literal(tool.name)} {rest} {_json_arguments(lark, tool)} {call}" for tool in tools]
    head = lark.rule(f"TEXT {literal(to)}", "[lazy]")
    return Opening(to, None, lark.whole(f"{head} ({' | '.join(ones)})"), in_header=True)


def grammar_text(tokenizer: Tokenizer, prompt_ids: Sequence[int], wanted: AnswerForm) -> str:
    """Return the grammar of the answer to a prompt."""
    lark = LarkText()
    if has_channels(tokenizer):
        return lark.whole(_in_channels(lark, tokenizer, wanted))
    form, thoughts = call_form_of(tokenizer), _thoughts(tokenizer, prompt_ids)
    return lark.whole(f"{thoughts} {_inline(lark, form, wanted)}")


def check_length(num_chars: int) -> None:
    """Raise UsageError for a grammar that is too long."""
    if num_chars > MAX_GRAMMAR_CHARS:
        raise UsageError(
            f"The form and its tools make a grammar of at least {num_chars} characters; at most "
            f"{MAX_GRAMMAR_CHARS} are accepted."
        )


def check_unicode(text: str, what: str) -> None:
    """Raise UsageError for half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"The {what} is not valid Unicode at character {error.start}.") from None


def check_depth(value: object, what: str) -> None:
    """Raise UsageError for JSON that is nested too deeply."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [part for each in level for part in _parts(each)]
        if not level:
            return
    raise UsageError(f"{what} is nested more than {MAX_DEPTH} deep; make it flatter.")


def _parts(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []


def enforces_text(tokenizer: Tokenizer, tool: Tool) -> bool:
    """Return True if the model's call format lets a tool's text be held to its grammar."""
    if only_text(tool) is None or not tool.grammar:
        return False
    is_raw = not has_channels(tokenizer) and call_form_of(tokenizer).has_raw_texts
    return is_raw or quoted_lark(tool.grammar) is not None


def _thoughts(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> str:
    """Return the grammar of an answer's thoughts: those begun by the prompt, or optional ones."""
    if not has_thoughts(tokenizer):
        return ""
    begin, end = (f"<[{tokenizer.token_id(mark)}]>" for mark in THOUGHT_MARKS)
    behind = rf"TEXT {end} /\n*/"
    return behind if is_thinking(tokenizer, prompt_ids) else f"({begin} {behind})?"


def _inline(lark: LarkText, form: CallForm, wanted: AnswerForm) -> str:
    text = lark.expression(wanted.text)
    if not wanted.tools:
        return text
    arguments = _raw_arguments if form.has_raw_texts else _json_arguments
    ones = [form.one(tool, arguments(lark, tool)) for tool in wanted.tools]
    calls = form.several(lark.rule(" | ".join(ones)), wanted.is_single)
    if wanted.must_call:
        return calls
    if wanted.text is not None:
        return f"({text} | {calls})"
    if form.has_token:
        return f"{lark.text_without(form.bare_begin)} ({calls})?"
    return _behind_text(lark, form, ones, calls)


def _behind_text(lark: LarkText, form: CallForm, ones: Sequence[str], calls: str) -> str:
    """Return text followed by optional calls, for models whose first mark is plain text.

    A lazy rule matches the mark before text can continue. If each call has its own mark, only one
    call is possible.
    """
    begin = form.mark(form.begin)
    if not calls.startswith(begin):
        calls = begin + f"({' | '.join(one.removeprefix(begin) for one in ones)})"
    head = lark.rule(f"TEXT {begin}", "[lazy]")
    return f"({head} {calls.removeprefix(begin)})? {lark.rule('TEXT')}"


def _json_arguments(lark: LarkText, tool: Tool) -> str:
    name, quoted = only_text(tool), quoted_lark(tool.grammar)
    if not tool.grammar or name is None or quoted is None:
        return lark.schema({"type": "object", **tool.parameters}, is_lenient=not tool.strict)
    head, tail = literal(f'{{{json.dumps(name)}: "'), literal('"}')
    return f"{head} {lark.grammar(quoted)} {tail}"


def _raw_arguments(lark: LarkText, tool: Tool) -> str:
    """Return Qwen3-Coder's parameters, in their order, with unquoted texts."""
    types = SchemaTypes(tool.parameters)
    if not types.names_members():
        text_end = lark.rule(f"TEXT {_VALUE_END}", "[lazy]")
        return rf'({literal(PARAMETER)} /[^>\n]+/ ">\n" {text_end})*'
    required, parts = types.required(), []
    for name, schema in types.parameters().items():
        head = literal(f"{PARAMETER}{name}>\n")
        is_grammar = tool.grammar and name == only_text(tool)
        value = f"{lark.grammar(tool.grammar)} {_VALUE_END}" if is_grammar else ""
        part = f"{head} {value or _raw_value(lark, types, schema, tool.strict)}"
        parts.append(part if name in required else f"({part})?")
    return " ".join(parts)


def _raw_value(lark: LarkText, types: SchemaTypes, schema: object, is_strict: bool) -> str:
    """Return a raw value and its end.

    is_strict: raise UsageError for a schema that cannot be enforced on a text.
    """
    kind = types.of(schema)
    if not kind.is_text or kind.kinds == ALL_KINDS:
        whole = types.whole(schema)
        of_json = lark.schema(whole if isinstance(whole, Mapping) else {}, is_lenient=not is_strict)
        return f"{of_json} {_VALUE_END}"
    if kind.choices:
        told = (one if isinstance(one, str) else json.dumps(one) for one in kind.choices)
        return f"({' | '.join(map(literal, told))}) {_VALUE_END}"
    pattern = text_pattern(types, schema) if is_strict else ""
    text = lark.terminal(f"TEXT & {_NO_END} & {pattern}") if pattern else "TEXT"
    return lark.rule(f"{text} {_VALUE_END}", "[lazy]")


_VALUE_END = literal(f"\n{PARAMETER_END}\n")
_NO_END = rf"~/(.|\n)*\n{PARAMETER_END.replace('/', chr(92) + '/')}\n(.|\n)*/"


def _mark(tokenizer: Tokenizer, text: str) -> str:
    token_id = tokenizer.token_id(text)
    return literal(text) if token_id is None else f"<[{token_id}]>"


def _in_channels(lark: LarkText, tokenizer: Tokenizer, wanted: AnswerForm) -> str:
    """Return gpt-oss' channels: analysis of any length, then a call or the final message.

    The prompt ends with the beginning of a header.
    """

    mark = partial(_mark, tokenizer)

    def message(header: str) -> str:
        return f"{mark(CHANNEL)} {literal(header)} {mark(MESSAGE)}"

    def before(channel: str) -> str:
        return f'({message(channel)} TEXT {mark(END)} {mark(START)} "assistant")'

    calls = []
    for tool in wanted.tools:
        header = literal(f"commentary to={FUNCTIONS}{tool.name} ")
        head = f'{mark(CHANNEL)} {header} {mark(CONSTRAIN)} "json" {mark(MESSAGE)}'
        calls.append(f"{head} {_json_arguments(lark, tool)} {mark(CALL)}")
    answers = [] if wanted.must_call else [f"{message('final')} {lark.expression(wanted.text)}"]
    return f"{before('analysis')}* {before('commentary')}? ({' | '.join(answers + calls)})"
