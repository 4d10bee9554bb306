"""Integers in schemas that a grammar would not keep to exactly."""

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
"""llguidance holds numbers as doubles: beyond this a bound is another one, and `const` no value."""


def without_inexact(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema without what it says of integers that are too large."""
    exact: dict[str, Any] = json.loads(json.dumps(schema), object_hook=_exact)
    return exact


def _exact(part: dict[str, Any]) -> dict[str, Any]:
    """A part of a schema, whose own parts are exact already."""
    for name in _KEYWORDS & part.keys():
        try:
            check_integers({name: part[name]})
        except UsageError:
            del part[name]
    return part


def check_integers(schema: object) -> None:
    """Raises UsageError for the first integer of a schema that is too large, by its keyword."""
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
