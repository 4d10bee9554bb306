"""Values of a request's JSON: each is refused by its place where it is not of the kind it must be.

Where a body's schema ends, because its form follows from a `type` that may be unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowtide.serve.errors import Refusal

MAX_NAME_CHARS = 256


def text_at(value: object, where: str) -> str:
    """Raises Refusal for anything else."""
    if not isinstance(value, str):
        raise _refused(where, "a text", value)
    return value


def name_at(value: object, where: str) -> str:
    """A name of a tool or a call: not empty, at most `MAX_NAME_CHARS` long. Raises Refusal."""
    name = text_at(value, where)
    if not 0 < len(name) <= MAX_NAME_CHARS:
        raise Refusal(f"{where} must have 1 to {MAX_NAME_CHARS} characters.", param=where)
    return name


def object_at(value: object, where: str) -> Mapping[str, Any]:
    """Raises Refusal for anything else."""
    if not isinstance(value, dict):
        raise _refused(where, "an object", value)
    return value


def objects_at(value: object, where: str) -> list[Mapping[str, Any]]:
    """Raises Refusal for anything but a list of objects."""
    if not isinstance(value, list):
        raise _refused(where, "a list", value)
    return [object_at(one, f"{where}[{i}]") for i, one in enumerate(value)]


def _refused(where: str, expected: str, value: object) -> Refusal:
    kinds = {str: "a text", dict: "an object", list: "a list", bool: "true or false"}
    found = "null" if value is None else kinds.get(type(value), "a number")
    return Refusal(f"{where} must be {expected}, not {found}.", param=where)
