"""Rewrites llguidance's errors for the client that sent the grammar.

llguidance quotes the grammar that lowtide generated, its own options and all special tokens of the
model, none of which the client knows.
"""

from __future__ import annotations

import re

from lowtide.files.json_file import printable

MAX_CHARS = 300

_EXCERPT = re.compile(r"\n *\d+ \| .*", re.DOTALL)
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_OF_REGEX = re.compile(r'invalid regex "(.{0,60})(.*)" \(in regex\): ', re.DOTALL)
_DRAWN = re.compile(r"regex parse error:.*?error: ", re.DOTALL)
_SCHEMA = "failed to compile JSON schema: "
_WORDS = (
    (r"Unimplemented keys: \[(.*)\]", r"keywords that are not supported: \1"),
    (
        r"oneOf constraints are not supported.*",
        "oneOf is not supported where two of its schemas may fit one value; use anyOf",
    ),
    (r"Resource '(.*)' is not present in .*", r"'\1' is not in the schema, and nothing is fetched"),
    (r"; following special tokens are available.*", ""),
    (r"Unsatisfiable schema: ", "no value fits it: "),
    (r"NoExtension\w*.*", "no text fits it"),
    (r"(?:parser error: )?Too many items.*", "it is too complex: there are too many ways to go on"),
    (
        r".*\b(?:fuel|too many states|too many expressions|LexerTooComplex|ParserTooComplex)\b.*",
        "it is too complex",
    ),
    (r".*\bgrammar size\b.*", "it is too large"),
    (r"\s*<non-verbose/>", ""),
)


def reason_of(error: str) -> str:
    """Return llguidance's reason without its dumps: part of a sentence, on one line."""
    text = _EXCERPT.sub("", error)
    place = _PLACE.match(text)
    text = _PLACE.sub("", text)
    is_of_schema = text.startswith(_SCHEMA)
    text = _OF_REGEX.sub(_shortened, text.removeprefix(_SCHEMA))
    text = _DRAWN.sub("", text)
    for pattern, words in _WORDS:
        text = re.sub(pattern, words, text, flags=re.DOTALL)
    if is_of_schema:
        text = f"JSON schema: {text}"
    elif place and "invalid regex" not in text:
        text = f"line {place[1]}, column {place[2]}: {text}"
    text = printable(" ".join(text.split()).rstrip("."))
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}..."


def _shortened(found: re.Match[str]) -> str:
    return f'invalid regex "{found[1]}{"..." if found[2] else ""}": '
