"""JSON as models write it: with Python's words and quotes, and backslashes that escape nothing."""

from __future__ import annotations

import re

from lowtide.parsing.call_json import parse_json

_PART = re.compile(
    r"""(?P<string>"(?:[^"\\]++|\\.)*+"|'(?:[^'\\]++|\\.)*+')|(?P<open>["'])"""
    r"|(?P<word>\b(?:True|False|None)\b)|(?P<comma>,(?=\s*[}\]]))",
    re.DOTALL,
)
_IN_STRING = re.compile(
    r'\\(?P<json>["\\/bfnrt]|u[0-9a-fA-F]{4})|\\x(?P<hex>[0-9a-fA-F]{2})|(?P<other>[\\"\x00-\x1f])',
)
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def loose_json(text: str) -> object:
    """Return the value of a JSON text, tolerating misspelt words, quotes and escapes.

    Raises ValueError or RecursionError for anything else.
    """
    try:
        return parse_json(text)
    except ValueError:
        return parse_json(_PART.sub(_respelled, text))


def _respelled(part: re.Match[str]) -> str:
    if part["open"]:  # at once: each further quote would search the rest again
        raise ValueError("a string that is not closed")
    if part["word"]:
        return _WORDS[part["word"]]
    if part["comma"]:
        return ""
    inside = part[0][1:-1]
    if part[0][0] == "'":
        inside = inside.replace("\\'", "'")
    return f'"{_IN_STRING.sub(_escaped, inside)}"'


def _escaped(found: re.Match[str]) -> str:
    if found["json"]:
        return found[0]
    if found["hex"]:
        return f"\\u00{found['hex']}"
    char = found["other"]
    return _ESCAPES.get(char) or f"\\u{ord(char):04x}"
