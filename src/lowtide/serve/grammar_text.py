"""Writes the grammar of a whole answer in llguidance's Lark: thoughts, text and calls.

The grammar follows the model's own format: thoughts first, calls between their marks, or messages
in channels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from llguidance import regex_to_lark

from lowtide.errors import UsageError
from lowtide.files.long_json import write_json
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.parsing.call_form import CallForm, Notation, literal
from lowtide.parsing.call_forms import call_form_of
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
from lowtide.parsing.thoughts import is_thinking, thought_marks_of
from lowtide.parsing.tools import Tool
from lowtide.serve.argument_grammar import arguments_grammar, json_arguments
from lowtide.serve.lark_text import MAX_GRAMMAR_CHARS, LarkText
from lowtide.serve.quoted_lark import quoted_lark

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
    ones = [form.one(tool, arguments_grammar(lark, form, tool)) for tool in tools]
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
    head = lark.rule(f"TEXT {literal(form.bare_begin)}", "[lazy]")
    end = literal(form.xml.function_end)
    ones = [
        f"{literal(f'{tool.name}>' + chr(10))} {arguments_grammar(lark, form, tool)} {end}"
        for tool in tools
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
    ones = [f"{literal(tool.name)} {rest} {json_arguments(lark, tool)} {call}" for tool in tools]
    head = lark.rule(f"TEXT {literal(to)}", "[lazy]")
    return Opening(to, None, lark.whole(f"{head} ({' | '.join(ones)})"), in_header=True)


def grammar_text(tokenizer: Tokenizer, prompt_ids: Sequence[int], wanted: AnswerForm) -> str:
    """Return the grammar of the answer to a prompt."""
    lark = LarkText()
    if has_channels(tokenizer):
        return lark.whole(_in_channels(lark, tokenizer, wanted))
    form, thoughts = call_form_of(tokenizer), _thoughts(tokenizer, prompt_ids)
    return lark.whole(f"{thoughts} {_inline(lark, form, wanted)}")


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
    raw = (Notation.XML, Notation.GEMMA)
    is_raw = not has_channels(tokenizer) and call_form_of(tokenizer).notation in raw
    return is_raw or quoted_lark(tool.grammar) is not None


def _thoughts(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> str:
    """Return the grammar of an answer's thoughts: those begun by the prompt, or optional ones."""
    marks = thought_marks_of(tokenizer)
    if marks is None:
        return ""
    begin, end = (f"<[{tokenizer.token_id(mark)}]>" for mark in marks.both)
    after = rf"TEXT {end} /\n*/"
    return after if is_thinking(tokenizer, prompt_ids) else f"({begin} {after})?"


def _inline(lark: LarkText, form: CallForm, wanted: AnswerForm) -> str:
    text = _expression(lark, wanted.text)
    if not wanted.tools:
        return text
    ones = [form.one(tool, arguments_grammar(lark, form, tool)) for tool in wanted.tools]
    calls = form.several(lark.rule(" | ".join(ones)), wanted.is_single)
    if wanted.must_call:
        return calls
    if wanted.text is not None:
        return f"({text} | {calls})"
    if form.has_token:
        return f"{lark.text_without(form.bare_begin)} ({calls})?"
    return _after_text(lark, form, ones, calls)


def _expression(lark: LarkText, wanted: Constraint | None) -> str:
    """Return the expression that a text must match."""
    if wanted is None:
        return "TEXT"
    if wanted.kind == "json_schema":
        return lark.schema(json.loads(wanted.text))
    return lark.grammar(wanted.text)


def _after_text(lark: LarkText, form: CallForm, ones: Sequence[str], calls: str) -> str:
    """Return text followed by optional calls, for models whose first mark is plain text.

    A lazy rule matches the mark before text can continue. If each call has its own mark, only one
    call is possible.
    """
    begin = form.mark(form.begin)
    if not calls.startswith(begin):
        calls = begin + f"({' | '.join(one.removeprefix(begin) for one in ones)})"
    head = lark.rule(f"TEXT {begin}", "[lazy]")
    return f"({head} {calls.removeprefix(begin)})? {lark.rule('TEXT')}"


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
        calls.append(f"{head} {json_arguments(lark, tool)} {mark(CALL)}")
    answers = [] if wanted.must_call else [f"{message('final')} {_expression(lark, wanted.text)}"]
    return f"{before('analysis')}* {before('commentary')}? ({' | '.join(answers + calls)})"
