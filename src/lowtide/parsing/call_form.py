"""Common base of the forms of tool calls.

Grammars are Lark for llguidance; `CallForm.mark` and `literal` write the fixed parts.
"""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum

from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.parsing.call_json import NAME, Call
from lowtide.parsing.tools import Tool
from lowtide.parsing.xml_syntax import CODER

JSON_HEAD = rf'\s*\{{\s*"name"\s*:\s*"({NAME})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
"""Pattern of a call as a JSON object, up to its arguments."""


class Notation(Enum):
    """Notations of a call's arguments.

    JSON: an object. XML: raw values between tags (`XmlSyntax`). PYTHON: `key="text"`. GEMMA:
    `key:<|"|>text<|"|>`.
    """

    JSON = "json"
    XML = "xml"
    PYTHON = "python"
    GEMMA = "gemma"


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def literal(text: str) -> str:
    """Quote a text for a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


class CallForm(ABC):
    """Form of a model's calls: marks, patterns, reader and grammar.

    begin: the mark that begins calls.
    sign: text by which a template or a tokenizer shows the form, if not `begin`.
    notation: how the model writes arguments; it may write JSON besides. xml: their tags.
    bare_begin: beginning of a call whose first mark was forgotten.
    ends: the closing mark for each opening mark, "" if the next call or the answer's end closes it.
    call_end: the mark after each of several calls.
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
    sign = ""
    notation = Notation.JSON
    xml = CODER
    bare_begin = ""
    head = re.compile(r"(?!)")

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
        """Return True while the notation of a begun call is not known."""
        return False

    def notation_of(self, held: str) -> Notation:
        """Return the notation of a begun call."""
        return self.notation

    @abstractmethod
    def is_no_call(self, held: str) -> bool:
        """Return True if a text that begins with a mark of calls can no longer become a call."""

    def mark(self, mark: str) -> str:
        """Write a mark in a grammar: as a token if it is one, else as text."""
        token_id = self._tokenizer.token_id(mark)
        return literal(mark) if token_id is None else f"<[{token_id}]>"

    @abstractmethod
    def read(self, text: str, tools: Mapping[str, Tool]) -> list[Call] | None:
        """Read the calls in a text up to the closing mark; return None if it is not a call.

        tools: by name.
        """

    @abstractmethod
    def one(self, tool: Tool, arguments: str) -> str:
        """Write the grammar of one call with the given grammar of arguments."""

    @abstractmethod
    def several(self, one: str, is_single: bool) -> str:
        """Write the grammar of all calls of an answer, each of them `one`."""
