"""Typed access to JSON objects of a request; errors name the field.

Used where no schema can be declared, because the form depends on a `type` that may be unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from lowtide.serve.conversation import joined
from lowtide.serve.errors import Refusal

MAX_NAME_CHARS = 256

MAX_PARTS = 1024
"""Most parts in one message or one tool's output."""


@dataclass(frozen=True, slots=True)
class PlacedObject:
    """An object and its path in a request. Its getters raise Refusal for a wrong type.

    default: used if the value is missing, null or empty.
    """

    fields: Mapping[str, Any]
    where: str

    def at(self, name: str) -> str:
        """Return the path of a field."""
        return f"{self.where}.{name}"

    def get(self, name: str, default: Any = None) -> Any:
        value = self.fields.get(name)
        return value if default is None else value or default

    def text(self, name: str, default: str | None = None) -> str:
        """Return a text, which may be empty."""
        value = self.get(name, default)
        if not isinstance(value, str):
            raise _refused(self.at(name), "a text", value)
        return value

    def name(self, name: str, default: str | None = None) -> str:
        """Return a tool's or call's name: not empty, at most `MAX_NAME_CHARS` long."""
        found, place = self.text(name, default), self.at(name)
        if not 0 < len(found) <= MAX_NAME_CHARS:
            raise Refusal(f"{place} must have 1 to {MAX_NAME_CHARS} characters.", param=place)
        return found

    def one_of(self, name: str, known: Collection[str]) -> str:
        """Return a text that is one of `known`."""
        found, place = self.text(name), self.at(name)
        if found not in known:
            raise Refusal(f"{place} {found[:80]!r:.80} is not known.", param=place)
        return found

    def object(self, name: str, default: Mapping[str, Any] | None = None) -> PlacedObject:
        return object_at(self.get(name, default), self.at(name))

    def objects(self, name: str, most: int, default: list[Any] | None = None) -> list[PlacedObject]:
        """Return a list of at most `most` objects."""
        return objects_at(self.get(name, default), self.at(name), most)


def object_at(value: object, where: str) -> PlacedObject:
    """Check that a value is an object. Raise Refusal."""
    if not isinstance(value, dict):
        raise _refused(where, "an object", value)
    return PlacedObject(value, where)


def objects_at(value: object, where: str, most: int) -> list[PlacedObject]:
    """Check that a value is a list of at most `most` objects. Raise Refusal."""
    if not isinstance(value, list):
        raise _refused(where, "a list", value)
    if len(value) > most:
        raise Refusal(f"{where} has {len(value)} values; at most {most} are accepted.", param=where)
    return [object_at(one, f"{where}[{i}]") for i, one in enumerate(value)]


def words_of(
    value: object,
    where: str,
    parts: str,
    fields: Mapping[str, str],
    ignored: list[str] | None = None,
) -> str:
    """Return the text of a message or a tool's output: a text, or a list of text parts.

    parts: the API's name for the types of parts, for error messages.
    fields: type of part -> the field with its text.
    ignored: collects the paths of other parts, which are replaced by a note to the model; they are
    not refused, because an agent sends such an output again at every turn. None: they are refused.
    """
    if isinstance(value, str):
        return value
    texts = []
    for part in objects_at(value, where, MAX_PARTS):
        kind = part.text("type")
        if kind in fields:
            texts.append(part.text(fields[kind]))
        elif ignored is None:
            raise unsupported(part.where, f"{parts} of type {kind[:80]!r:.80}")
        else:
            ignored.append(part.at(kind))
            texts.append(left_out(kind))
    return joined(texts)


def left_out(kind: str) -> str:
    """Return the note that replaces a part that is not text."""
    return f"[{kind:.80} left out: this model reads text alone]"


def unsupported(where: str, what: str) -> Refusal:
    """Return a refusal of content that is not text."""
    return Refusal(
        f"{where}: {what} are not supported; models read text here.",
        param=where,
        code="unsupported",
    )


def _refused(where: str, expected: str, value: object) -> Refusal:
    kinds = {str: "a text", dict: "an object", list: "a list", bool: "true or false"}
    found = "null" if value is None else kinds.get(type(value), "a number")
    return Refusal(f"{where} must be {expected}, not {found}.", param=where)
