"""Reads the literals, calls and lists of other programs' tests in C++."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

_TOKEN = re.compile(
    r'(?P<space>\s+|//[^\n]*|/\*.*?\*/)|R"(?P<mark>[^\s()\\]{0,16})\((?P<raw>.*?)\)(?P=mark)"'
    r'|"(?P<text>(?:\\.|[^"\\])*)"|(?P<name>[A-Za-z_][\w]*(?:::[A-Za-z_]\w*)*)'
    r"|(?P<number>-?\d[\w.]*)|(?P<sign>.)",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "b": "\b", "f": "\f"}


class Name(NamedTuple):
    """Something that is defined elsewhere."""

    name: str


class Made(NamedTuple):
    """A call, or what a list in braces makes; name: of what, "" for a list alone."""

    name: str
    parts: list[Any]


class Unread(ValueError):
    """C++ that is more than this reads."""


class Reader:
    """Reads values from a place of a text on."""

    def __init__(self, text: str, place: int = 0) -> None:
        self._text, self.place = text, place
        self.kind = self.value = ""
        self._next()

    def expression(self) -> Any:
        """Strings, names, numbers, calls, lists, and sums of strings."""
        found = self._primary()
        while self.value == "+" and self.kind == "sign":
            self._next()
            more = self._primary()
            if not isinstance(found, str) or not isinstance(more, str):
                raise Unread("a sum of no strings")
            found += more
        return found

    def arguments(self) -> list[Any]:
        """Return the values in parentheses, of which the first is next."""
        return self._list("(", ")")

    def chain(self) -> Iterator[tuple[str, list[Any]]]:
        """Calls one after the other, to the end of the statement."""
        while self.kind == "sign" and self.value == ".":
            self._next()
            name = self.value
            self._next()
            yield name, self.arguments()

    def _primary(self) -> Any:
        if self.kind == "string":
            found = ""
            while self.kind == "string":
                found += self.value
                self._next()
            return found
        if self.kind == "number":
            found = self.value
            self._next()
            return found
        if self.kind == "name":
            name = self.value
            self._next()
            if self.kind == "sign" and self.value in "({":
                pair = "()" if self.value == "(" else "{}"
                return Made(name, self._list(*pair))
            return Name(name)
        if self.value == "{":
            return Made("", self._list("{", "}"))
        raise Unread(f"{self.value!r} at {self.place}")

    def _list(self, begin: str, end: str) -> list[Any]:
        if self.value != begin or self.kind != "sign":
            raise Unread(f"no {begin} at {self.place}")
        self._next()
        found = []
        while self.kind != "sign" or self.value != end:
            found.append(self.expression())
            if self.kind == "sign" and self.value == ",":
                self._next()
            elif self.kind != "sign" or self.value != end:
                raise Unread(f"{self.value!r} in a list at {self.place}")
        self._next()
        return found

    def _next(self) -> None:
        while (token := _TOKEN.match(self._text, self.place)) is not None:
            self.place = token.end()
            if token["space"] is not None:
                continue
            if token["raw"] is not None:
                self.kind, self.value = "string", token["raw"]
            elif token["text"] is not None:
                self.kind, self.value = "string", _ESCAPE.sub(_unescaped, token["text"])
            else:
                kind = next(k for k in ("name", "number", "sign") if token[k] is not None)
                self.kind, self.value = kind, token[kind]
            return
        self.kind = self.value = ""


def _unescaped(found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3]
    return chr(int(code, 16)) if code else _SIMPLE.get(found[4], found[4])
