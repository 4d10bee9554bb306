"""Integers in JSON schemas that are too large for a grammar to enforce exactly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lowtide.errors import UsageError

_KEYWORDS = {
    "const",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
}

MAX_EXACT = 2**53
"""llguidance stores numbers as doubles, so larger bounds and constants would be rounded."""


def without_inexact(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema without keywords whose integers are too large."""
    exact: dict[str, Any] = json.loads(json.dumps(schema), object_hook=_exact)
    return exact


def _exact(part: dict[str, Any]) -> dict[str, Any]:
    for name in _KEYWORDS & part.keys():
        try:
            check_integers({name: part[name]})
        except UsageError:
            del part[name]
    return part


def check_integers(schema: object) -> None:
    """Raise UsageError for the first integer that is too large, naming its keyword."""
    left: list[tuple[object, str]] = [(schema, "")]
    while left:
        value, keyword = left.pop()
        if isinstance(value, Mapping):
            left += ((each, keyword or _keyword(name)) for name, each in value.items())
        elif isinstance(value, list):
            left += ((each, keyword) for each in value)
        elif keyword and isinstance(value, int | float) and abs(value) > MAX_EXACT:
            if keyword == "maximum" and value == 2**63 - 1:
                continue  # of a signed integer: that one is kept to
            raise UsageError(
                f"The schema's {keyword} {value!r:.40} is beyond the integers that can be kept to "
                f"exactly, {-MAX_EXACT} to {MAX_EXACT}: leave it out, or make the value a string."
            )


def _keyword(name: object) -> str:
    return str(name) if name in _KEYWORDS else ""
