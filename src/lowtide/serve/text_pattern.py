"""Lark terminals from a JSON schema's string keywords, for texts written without quotes."""

from __future__ import annotations

import json
import re

from llguidance import regex_to_lark

from lowtide.errors import UsageError
from lowtide.parsing.schema_types import SchemaTypes

MAX_LENGTH = 100_000
MAX_ALTERNATIVES = 64

_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60)(\.[0-9]+)?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HEX = r"[0-9a-fA-F]"
_GROUP = rf"{_HEX}{{1,4}}"
_GROUPS = rf"({_GROUP}(:{_GROUP}){{0,5}})?"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}[Tt ]{_TIME}",
    "duration": r"P([0-9]+W|([0-9]+Y)?([0-9]+M)?([0-9]+D)?(T([0-9]+H)?([0-9]+M)?([0-9]+S)?)?)",
    "email": rf"[A-Za-z0-9.!#$%&'*+/=?^_`{{|}}~-]{{1,64}}@{_LABEL}(\.{_LABEL})*",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": rf"({_GROUP}:){{7}}{_GROUP}|{_GROUPS}::{_GROUPS}",
    "uuid": rf"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+",
}
"""Regular expressions of formats, in Rust's syntax."""

_KEYWORDS = ("pattern", "minLength", "maxLength", "format")


def text_pattern(types: SchemaTypes, schema: object) -> str:
    """Return the terminals that a text must match, joined by `&`; "" for any text.

    Raises UsageError for unsupported keywords.
    """
    alternatives = types.alternatives(schema)
    if not alternatives:
        return " & ".join(_terminals(types, schema))
    if len(alternatives) > MAX_ALTERNATIVES:
        raise UsageError(f"strict: a text has more than {MAX_ALTERNATIVES} alternatives.")
    ours = _terminals(types, schema)
    options = []
    for each in alternatives:
        if types.alternatives(each):
            raise UsageError("strict: alternatives of a text that have alternatives themselves.")
        kind = types.of(each)
        if kind.is_text and kind.choices is None:
            options.append(" & ".join(_terminals(types, each)) or "TEXT")
        elif kind.choices is None:
            return " & ".join(ours)  # what the other types are is read from the text
        else:
            options += [
                _exactly(one if isinstance(one, str) else json.dumps(one)) for one in kind.choices
            ]
    return " & ".join([*ours, f"({' | '.join(f'({one})' for one in options)})"])


def _terminals(types: SchemaTypes, schema: object) -> list[str]:
    """Return one terminal per keyword."""
    found = []
    shortest, longest = 0, None
    for name, value in types.keywords(schema, _KEYWORDS):
        if name == "pattern" and isinstance(value, str):
            found.append(_terminal(_searched(value)))
        elif name == "format" and isinstance(value, str):
            if value not in FORMATS:
                known = ", ".join(FORMATS)
                raise UsageError(f"strict: format {value!r:.80} is not known; these are: {known}.")
            found.append(_terminal(FORMATS[value]))
        elif name == "minLength" and isinstance(value, int):
            shortest = max(shortest, value)
        elif name == "maxLength" and isinstance(value, int):
            longest = value if longest is None else min(longest, value)
    if max(shortest, longest or 0) > MAX_LENGTH:
        raise UsageError(f"strict: a text's length is bounded up to {MAX_LENGTH} characters.")
    if shortest or longest is not None:
        found.append(_terminal(rf"(.|\n){{{shortest},{'' if longest is None else longest}}}"))
    return found


def _searched(pattern: str) -> str:
    """Return an expression for a whole text that contains a match of a schema's `pattern`."""
    has_end = pattern.endswith("$") and not re.search(r"(?<!\\)(\\\\)*\\\$\Z", pattern)
    begin = "" if pattern.startswith("^") else r"(.|\n)*"
    end = "" if has_end else r"(.|\n)*"
    body = pattern.removeprefix("^")
    return f"{begin}({body[:-1] if has_end else body}){end}"


def _exactly(text: str) -> str:
    return _terminal(re.escape(text))


def _terminal(expression: str) -> str:
    return f"/{regex_to_lark(expression)}/"
