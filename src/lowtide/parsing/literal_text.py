"""Read calls whose arguments are literals by name: LFM2's, as Python writes them, and Gemma 4's.

LFM2: `[NAME(key="text", n=1), ...]`. Gemma: `call:NAME{key:<|"|>text<|"|>,n:1}`, strings raw.

A string may hold quotes that nothing escapes: it ends at the first quote after which the call can
go on. The tool's schema says which names can follow, each once, and the types of values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Set
from typing import NamedTuple

from lowtide.parsing.call_json import NAME, Call, is_name, json_text, key_pattern, parse_json
from lowtide.parsing.schema_types import ANY, SchemaTypes, ValueType, fits
from lowtide.parsing.tools import Tool
from lowtide.parsing.xml_text import typed

GEMMA_QUOTE = '<|"|>'

MAX_DEPTH = 64
MAX_ENDS = 10_000
"""Most quotes of a call at which a string's end is looked for."""

_BLANKS = r"\s{0,256}+"
_NAME = re.compile(NAME)
_BARE = re.compile(r"[^,\[\]{}()\"\n]+")
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_ESCAPE = re.compile(
    r"\\(?:(?P<line>\r?\n)|x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})"
    r"|U(?P<U>[0-9a-fA-F]{8})|(?P<simple>.))",
    re.DOTALL,
)
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0"}
_SIMPLE |= {each: each for each in "\\'\"/"}


class NoLiteral(ValueError):
    """Text that is not a call of the form."""


class _Spelling(NamedTuple):
    """Quotes of strings, longest first, and the texts around a call's arguments.

    prefix: pattern of letters before a quote. key: pattern of a usual name. gap: pattern between
    a comma and a name, as a grammar has it. after: pattern of what may follow a call.
    """

    quotes: tuple[str, ...]
    prefix: str
    has_escapes: bool
    key: str
    gap: str
    assign: str
    close: str
    after: str


_PYTHON = _Spelling(
    ('"""', "'''", '"', "'"),
    "[bBfFrRuU]{0,2}",
    True,
    r"[\w.$/-]{1,256}",
    " ?",
    "=",
    ")",
    rf"{_BLANKS}(?:\]?{_BLANKS}\Z|,{_BLANKS}(?:\]|{NAME}{_BLANKS}\())",
)
_GEMMA = _Spelling(
    (GEMMA_QUOTE, '"'), "", False, r'[^\s:,<>|"\[\]{}]{1,256}', "", ":", "}", rf"{_BLANKS}\Z"
)


def python_calls(text: str, tools: Mapping[str, Tool]) -> list[Call]:
    """Read a list of calls, or calls without brackets around them. Raises NoLiteral."""
    return _read(text, _PYTHON, tools)


def gemma_call(text: str, tools: Mapping[str, Tool]) -> Call:
    """Read one call. Raises NoLiteral."""
    [call] = _read(text, _GEMMA, tools)
    return call


def _read(text: str, spelling: _Spelling, tools: Mapping[str, Tool]) -> list[Call]:
    try:
        return _Reader(text.strip(), spelling, tools, is_known=True).calls()
    except NoLiteral:  # arguments may have names that the schema has not
        return _Reader(text.strip(), spelling, tools, is_known=False).calls()


class _ToolKeys(NamedTuple):
    """A tool's parameters, and patterns of their names."""

    types: SchemaTypes
    schemas: Mapping[str, object]  # of its parameters
    key: re.Pattern[str]  # a name, the schema's own as they are spelled (see `key_pattern`)
    first_key: re.Pattern[str]  # a name that gets a value
    next_key: re.Pattern[str]  # one after a comma


class _Reader:
    """Reader of literals from left to right. is_known: a schema says which names can follow."""

    def __init__(
        self, text: str, spelling: _Spelling, tools: Mapping[str, Tool], is_known: bool
    ) -> None:
        self._text, self._spelling, self._tools = text, spelling, tools
        self._is_known = is_known
        self._place = 0
        self._num_ends = 0
        last = re.escape(spelling.close) + spelling.after
        self._last = re.compile(rf"{_BLANKS},?{_BLANKS}{last}")
        quotes = "|".join(map(re.escape, spelling.quotes))
        self._opening = re.compile(rf"({spelling.prefix})({quotes})")
        self._keys_by_tool: dict[str, _ToolKeys] = {}  # "" is any unknown one

    def _keys_of(self, name: str) -> _ToolKeys:
        """Return the keys of a tool's calls, by its schema; that is read once for all of them."""
        tool = self._tools.get(name)
        name = "" if tool is None else name
        if name not in self._keys_by_tool:
            types = SchemaTypes({} if tool is None else tool.parameters)
            schemas = types.parameters()
            names = [*schemas, *types.inner_names()]
            key = key_pattern(self._spelling.key, names)
            value = _BLANKS + re.escape(self._spelling.assign)
            first, following = "", ""
            if any(each[:1].isspace() for each in names):  # then blanks may be a name's
                known = f"(?=(?:{'|'.join(map(re.escape, names))}){value})"
                first, following = f"{known}|", f"{self._spelling.gap}{known}|"
            self._keys_by_tool[name] = _ToolKeys(
                types,
                schemas,
                re.compile(key),
                re.compile(rf"(?:{first}{_BLANKS})({key}){value}"),
                re.compile(rf"{_BLANKS},(?:{following}{_BLANKS})({key}){value}"),
            )
        return self._keys_by_tool[name]

    def calls(self) -> list[Call]:
        """Return all calls of the text."""
        if self._spelling is _GEMMA:
            self.takes(":")  # that some write before
            if not self.takes("call:"):
                raise NoLiteral("no call")
            calls = [self._call("{")]
        else:
            calls = self._python_calls()
        self._skip_blanks()
        if self._place < len(self._text):
            raise NoLiteral(f"more at {self._place}")
        return calls

    def _python_calls(self) -> list[Call]:
        has_list, calls = self.takes("["), [self._call("(")]
        while self.takes(",") and not self._is_next("]"):
            calls.append(self._call("("))
        if has_list and not self.takes("]"):
            raise NoLiteral("a list that is not closed")
        return calls

    def _call(self, begin: str) -> Call:
        name = self._word(_NAME)
        if not is_name(name) or not self.takes(begin):
            raise NoLiteral("no name")
        return Call(name, json_text(self._arguments(name)))

    def takes(self, text: str) -> bool:
        """Take this text, after blanks, if it is next."""
        self._skip_blanks()
        is_next = self._text.startswith(text, self._place)
        self._place += len(text) * is_next
        return is_next

    def _word(self, pattern: re.Pattern[str]) -> str:
        """Take what a pattern matches, after blanks."""
        self._skip_blanks()
        found = pattern.match(self._text, self._place)
        if found is None:
            raise NoLiteral(f"nothing at {self._place}")
        self._place = found.end()
        return found[0]

    def _arguments(self, tool: str) -> dict[str, object]:
        """Take the arguments of a tool's call and its closing bracket."""
        types, schemas, self._key, self._first_key, self._next_key = self._keys_of(tool)
        is_known = self._is_known and schemas and not types.takes_others()
        values: dict[str, object] = {}
        found = self._first_key.match(self._text, self._place)
        while True:
            # First, as a name of the schema may look like a quote or the end.
            if found:
                name, self._place = found[1], found.end()
            elif self.takes(self._spelling.close):
                break
            else:
                name = self._name()
                if not self.takes(self._spelling.assign):
                    raise NoLiteral("no value")
            self._skip_blanks()
            start = self._place
            left = schemas.keys() - {*values, name} if is_known else None
            value = self._string("", left) if self._quote() else self._value(0)
            kind = types.of(schemas[name]) if name in schemas else ANY
            values[name] = _as(kind, value, self._text[start : self._place].strip())
            found = self._next_key.match(self._text, self._place)
            if not found and not self.takes(","):
                if not self.takes(self._spelling.close):
                    raise NoLiteral("no end")
                break
        return values

    def _name(self) -> str:
        """Take a key, bare or in quotes."""
        self._skip_blanks()
        return self._string(":", None) if self._quote() else self._word(self._key)

    def _value(self, depth: int, close: str = "") -> object:
        """Take a value. close: the bracket that closes what it is in."""
        if depth > MAX_DEPTH:
            raise NoLiteral("nested too deeply")
        self._skip_blanks()
        if self._quote():
            return self._string(close, None)
        for begin, end in ("[]", "()"):
            if self.takes(begin):
                return self._list(end, depth)
        if self.takes("{"):
            return self._object(depth)
        if self._spelling is _GEMMA and self._text[self._place : self._place + 1] in (",", "}"):
            return ""  # left out
        return self._bare()

    def _list(self, close: str, depth: int) -> list[object]:
        values: list[object] = []
        while not self.takes(close):
            values.append(self._value(depth + 1, close))
            if not self.takes(",") and not self._is_next(close):
                raise NoLiteral("no end of a list")
        return values

    def _object(self, depth: int) -> dict[str, object] | list[object]:
        """Take the members of an object, or of a Python set."""
        values: dict[str, object] = {}
        while (found := self._inner_key()) or not self.takes("}"):
            start = self._place
            try:
                if found:
                    name, self._place, is_set = found[1], found.end(), False
                else:
                    name = self._name()
                    is_set = not self.takes(":")
            except NoLiteral:
                is_set = True
            if is_set:
                if values or self._spelling is _GEMMA:
                    raise NoLiteral("no value in an object")
                self._place = start
                return self._list("}", depth)
            values[name] = self._value(depth + 1, "}")
            if not self.takes(",") and not self._is_next("}"):
                raise NoLiteral("no end of an object")
        return values

    def _inner_key(self) -> re.Match[str] | None:
        """Find the bare name of a member in Gemma's objects; Python's are quoted."""
        return self._first_key.match(self._text, self._place) if self._spelling is _GEMMA else None

    def _bare(self) -> object:
        """Take a number, a word or a text without quotes."""
        text = self._word(_BARE).strip()
        if text in _WORDS:
            return _WORDS[text]
        return _number(text) if _NUMBER.fullmatch(text) else text

    def _quote(self) -> re.Match[str] | None:
        """Find the quote that is next, and what stands before it."""
        return self._opening.match(self._text, self._place)

    def _string(self, close: str, left: Set[str] | None) -> str:
        """Take a string up to a quote after which the call can go on.

        close: see `_value`; ":" for a key, "" for an argument. left: the arguments that may follow.
        """
        opening = self._quote()
        if opening is None:
            raise NoLiteral(f"no string at {self._place}")
        quote, begin, place = opening[2], opening.end(), opening.end()
        while (end := self._text.find(quote, place)) >= 0:
            self._num_ends += 1
            if self._num_ends > MAX_ENDS:
                raise NoLiteral("too many quotes")
            place = end + 1
            if self._spelling.has_escapes and _is_escaped(self._text, begin, end):
                continue
            if self._goes_on(end + len(quote), close, left):
                self._place = end + len(quote)
                text = self._text[begin:end]
                is_raw = not self._spelling.has_escapes or "r" in opening[1].lower()
                return text if is_raw else _unescaped(text)
        raise NoLiteral("a string that is not closed")

    def _goes_on(self, place: int, close: str, left: Set[str] | None) -> bool:
        if close:
            pattern = ":" if close == ":" else f"[,{re.escape(close)}]"
            return re.compile(_BLANKS + pattern).match(self._text, place) is not None
        key = self._next_key.match(self._text, place)
        is_key = key is not None and (left is None or key[1] in left)
        return is_key or self._last.match(self._text, place) is not None

    def _is_next(self, text: str) -> bool:
        self._skip_blanks()
        return self._text.startswith(text, self._place)

    def _skip_blanks(self) -> None:
        while self._place < len(self._text) and self._text[self._place].isspace():
            self._place += 1


def _as(kind: ValueType, value: object, written: str) -> object:
    """Convert a value to its schema's type where it has another one."""
    if isinstance(value, str):
        return value if kind.is_text else typed(value, kind)
    return written if kind.is_text and not fits(value, kind.kinds) else value


def _number(text: str) -> object:
    try:
        return parse_json(re.sub(r"^(-?)\+?0+(?=\d)", r"\1", text).removeprefix("+"))
    except ValueError:  # spelled as Python allows, or not finite
        number = float(text)
        return number if math.isfinite(number) else text


def _is_escaped(text: str, begin: int, place: int) -> bool:
    num = 0
    while place - num > begin and text[place - num - 1] == "\\":
        num += 1
    return num % 2 == 1


def _unescaped(text: str) -> str:
    """Resolve escapes as Python and JSON have them; pairs of surrogates become one character."""
    found = _ESCAPE.sub(_character, text)
    return found.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def _character(escape: re.Match[str]) -> str:
    if escape["line"]:
        return ""
    code = escape["x"] or escape["u"] or escape["U"]
    if code is not None:
        return chr(int(code, 16)) if int(code, 16) < 0x110000 else escape[0]
    return _SIMPLE.get(escape["simple"], escape[0])
