"""Rewrites llguidance's errors for the client that sent the grammar.

llguidance quotes the grammar that lowtide generated, its own options and all special tokens of the
model, none of which the client knows.
"""

from __future__ import annotations

import re

from lowtide.files.json_file import printable

MAX_CHARS = 300

_MAX_READ = 1000
"""Most characters of an error, without an expression that it quotes, that are searched."""

_MAX_REGEX_CHARS = 60

_EXCERPT = re.compile(r"\n *\d+ \| .*", re.DOTALL)
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_REGEX_BEGIN, _REGEX_END = 'invalid regex "', '" (in regex): '
_DRAWN_BEGIN, _DRAWN_END = "regex parse error:", "error: "
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
        r"\A.*\b(?:fuel|too many states|too many expressions|LexerTooComplex|ParserTooComplex)\b.*",
        "it is too complex",
    ),
    (r"\A.*\bgrammar size\b.*", "it is too large"),
    (r"\bpanic: ", "the compiler failed: "),
    (r"\s*<non-verbose/>", ""),
)


def reason_of(error: str) -> str:
    """Return llguidance's reason without its dumps: part of a sentence, on one line."""
    text = _EXCERPT.sub("", error).partition("<backtrace>")[0]
    place = _PLACE.match(text)
    text = _PLACE.sub("", text)
    is_of_schema = text.startswith(_SCHEMA)
    text = _without_regex(text.removeprefix(_SCHEMA))
    if len(text) > _MAX_READ:
        text = f"{text[: _MAX_READ // 2]} ... {text[-_MAX_READ // 2 :]}"
    for pattern, words in _WORDS:
        text = re.sub(pattern, words, text, flags=re.DOTALL)
    if is_of_schema:
        text = f"JSON schema: {text}"
    elif place and "invalid regex" not in text:
        text = f"line {place[1]}, column {place[2]}: {text}"
    text = printable(" ".join(text.split()).rstrip("."))
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}..."


def _without_regex(text: str) -> str:
    """Shorten a quoted expression, and remove the drawing of its error."""
    begin, end = text.find(_REGEX_BEGIN), text.rfind(_REGEX_END)
    start = begin + len(_REGEX_BEGIN)
    if 0 <= begin and start <= end:
        regex, after = text[start:end], text[end + len(_REGEX_END) :]
        cut = "..." if len(regex) > _MAX_REGEX_CHARS else ""
        text = f'{text[:start]}{regex[:_MAX_REGEX_CHARS]}{cut}": {after}'
    begin = text.find(_DRAWN_BEGIN)
    end = text.rfind(_DRAWN_END, begin + len(_DRAWN_BEGIN)) if begin >= 0 else -1
    return text if end < 0 else text[:begin] + text[end + len(_DRAWN_END) :]
