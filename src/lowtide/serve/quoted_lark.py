"""Turns the Lark grammar of a text into the grammar of that text inside a JSON string.

JSON escapes single characters and leaves most as they are, so a grammar's strings and expressions
can be rewritten one at a time. Its rules become terminals, used by a single rule: between two
terminals llguidance looks only one byte ahead, and JSON's escapes are longer. So no rule may refer
to itself. A grammar that cannot be rewritten with certainty is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

_PART = re.compile(
    r'(?P<string>"(?:\\.|[^"\\\n])*+(?P<end>"i?)?+)'
    r"|(?P<regex>/(?:\\.|[^/\\\n])++(?P<flags>/[imslux]*+)?+)"
    r"|(?P<comment>(?:#|//)[^\n]*)|(?P<alias>->[ \t]*\w+)"
    r"|%import\s+common\.(?P<imported>\w+)(?P<renamed>\s*->\s*\w+)?"
    r"|(?P<other>%\w+|[@<\[~]|^[ \t]*[?!])|(?P<rule>\b_?[a-z]\w*)",
    re.MULTILINE,
)
"""Tokens that are rewritten. What is not closed is one, too: it is searched once."""

_QUOTED = re.compile(r'"(?:\\.|[^"\\])*+"?|/(?:\\.|[^/\\])++/?')
_RULE = re.compile(r"^(\w+)[ \t]*:", re.MULTILINE)
_LINE_BREAKS = {"LF": r"\\n", "CR": r"\\r", "NEWLINE": r"(?:(?:\\r)?\\n)+"}
_SAME = {"DIGIT", "HEXDIGIT", "INT", "LETTER", "LCASE_LETTER", "UCASE_LETTER", "WORD", "CNAME"}

_NAMED = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
"""Characters that JSON writes as a backslash and a letter or sign."""

_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f"}
_CONTROL = r"\x00-\x1F"
_PLAIN_RANGES = (("0", "9"), ("A", "Z"), ("a", "z"), ("\x80", "\U0010ffff"))


class _NotQuotable(Exception):
    """The grammar has a part that cannot be rewritten."""


def quoted_lark(grammar: str) -> str | None:
    """Return the grammar of the inside of a JSON string, or None if it cannot be rewritten."""
    try:
        rules = _PART.sub(_rewritten, grammar)
    except (_NotQuotable, ValueError):
        return None
    return None if _is_recursive(rules) else f"start: {_renamed('start')}\n{rules}"


def _is_recursive(rules: str) -> bool:
    """Return True if a rule refers to itself, directly or through others."""
    parts = _RULE.split(_QUOTED.sub("", rules))
    uses = {
        name: set(re.findall(r"\w+", body))
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }
    try:
        TopologicalSorter(uses).prepare()
    except CycleError:
        return True
    return False


def _renamed(rule: str) -> str:
    return f"RULE_{rule.upper()}"


def _rewritten(part: re.Match[str]) -> str:
    """Return one token of a grammar as it reads inside a JSON string. Raises _NotQuotable."""
    is_open = part["end"] is None and part["flags"] is None
    if is_open and (part["string"] is not None or part["regex"] is not None):
        return part[0]  # llguidance says that it is not closed
    if part["string"] is not None:
        return json.dumps(json.dumps(json.loads(part["string"]), ensure_ascii=False)[1:-1])
    if part["regex"] is not None:
        body, _, flags = part["regex"][1:].rpartition("/")
        if flags:
            raise _NotQuotable
        return f"/{''.join(_quoted(body))}/"
    if part["comment"] is not None or part["alias"] is not None:
        return ""
    if part["rule"] is not None:
        return _renamed(part["rule"])
    if part["imported"] in _LINE_BREAKS and not part["renamed"]:
        return f"{part['imported']}: /{_LINE_BREAKS[part['imported']]}/"
    if part["imported"] in _SAME and not part["renamed"]:
        return part[0]
    raise _NotQuotable


def _quoted(body: str) -> Iterator[str]:
    """Rewrite a regular expression, piece by piece."""
    place = 0
    while place < len(body):
        char = body[place]
        if char == "[":
            one, place = _quoted_class(body, place + 1)
            yield one
            continue
        if body.startswith("(?", place) and not body.startswith("(?:", place):
            raise _NotQuotable
        if char == "\\":
            place += 1
            yield _quoted_escape(body[place : place + 1])
        elif char == ".":
            yield _one_of("", is_negated=True, escapes="\n")
        else:
            yield _one_of("", False, char) if char in _NAMED else char
        place += 1


def _quoted_escape(char: str) -> str:
    if char == "s":
        return _one_of(" ", False, "\t\n\r\f")
    if char in ("d", "w"):
        return f"\\{char}"
    if not char or char.isalnum() and char not in _ESCAPES:
        raise _NotQuotable
    char = _ESCAPES.get(char, char)
    return _one_of("", False, char) if char in _NAMED else f"\\{char}"


def _quoted_class(body: str, place: int) -> tuple[str, int]:
    """Rewrite a bracketed class from after its `[`; return it and the place after its `]`."""
    is_negated = body.startswith("^", place)
    chars, place = _class_chars(body, place + is_negated)
    members, escapes, index = "", "", 0
    while index < len(chars):
        char = chars[index][0]
        if chars[index + 1 : index + 2] == [("-", False)] and index + 2 < len(chars):
            end = chars[index + 2][0]
            if not any(low <= char <= end <= high for low, high in _PLAIN_RANGES):
                raise _NotQuotable
            members += f"{char}-{end}"
            index += 3
            continue
        if char in _NAMED:
            escapes += char
        else:
            members += f"\\{char}" if char in "]^-[&~/" else char
        index += 1
    return _one_of(members, is_negated, escapes), place


def _class_chars(body: str, place: int) -> tuple[list[tuple[str, bool]], int]:
    """List a class's characters, each with True if escaped; return the place after its end, too."""
    chars: list[tuple[str, bool]] = []
    while body[place : place + 1] != "]" or not chars:
        is_escaped = body.startswith("\\", place)
        place += is_escaped
        char = body[place : place + 1]
        if not char or not is_escaped and char in "[&":  # Rust's own sets
            raise _NotQuotable
        if is_escaped and char.isalnum() and char not in _ESCAPES:
            raise _NotQuotable
        chars.append((_ESCAPES.get(char, char) if is_escaped else char, is_escaped))
        place += 1
    return chars, place + 1


def _one_of(members: str, is_negated: bool, escapes: str) -> str:
    """Return an expression for one of the members or, if negated, for any other character.

    escapes: members that JSON writes as an escape.
    """
    if is_negated:
        others = "".join(re.escape(_NAMED[char]) for char in _NAMED if char not in escapes)
        return rf'(?:[^{members}"\\{_CONTROL}]|\\[{others}])'
    written = [rf"\\{re.escape(_NAMED[char])}" for char in escapes]
    return f"(?:{'|'.join([*([f'[{members}]'] if members else []), *written])})"
