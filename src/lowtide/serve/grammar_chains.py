"""Bounds the chains of references in a schema or a grammar before it is compiled.

llguidance recurses once per link, and takes minutes for chains of some thousand links.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from lowtide.errors import UsageError

MAX_CHAIN = 256

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_MAPS = ("properties", "patternProperties", "dependentSchemas")
_NOT_INSIDE = ("$defs", "definitions", "enum", "const", "default", "examples")
"""Keywords whose content is not applied to a value unless a reference leads there."""

_LARK = re.compile(
    r'"(?:\\.|[^"\\\n])*+(?:"i?)?+|(?:#|//)[^\n]*+|/(?:\\.|[^/\\])++(?:/[imslux]*+)?+|<[^<>\s]++>'
    r"|(?P<json>%(?:json|llguidance|regex)\b)|(?P<statement>%\w++)|(?P<name>@?+[\w-]++)",
    re.DOTALL,
)
"""Tokens of a Lark grammar, so that names of rules are not sought in strings or comments.

What is not closed is one token, too: otherwise each further quote would search the rest again.
"""

_IS_DEFINED = re.compile(
    r"[ \t]*+(?:\{[^{}\n]*+\}[ \t]*+)?(?:\.[ \t]*+[+-]?\d++[ \t]*+)?(?:\[[^\[\]\n]*+\][ \t]*+)?:"
)
_BLANKS = re.compile(r"\s*+")


def check_schema(schema: Mapping[str, Any], what: str) -> None:
    """Raise UsageError if a JSON schema has too long a chain of references."""
    links = Links()
    _check(links.longest([links.add_schema(schema)]), what)


def check_lark(grammar: str, what: str) -> None:
    """Raise UsageError if a Lark grammar, with the schemas in it, has too long a chain."""
    links = Links()
    _check(links.longest(links.add_grammar(grammar)), what)


def _check(length: int, what: str) -> None:
    if length > MAX_CHAIN:
        raise UsageError(
            f"{what} has a chain of {length} references, each to the next; at most {MAX_CHAIN} "
            "are accepted. Write some of them out where they are used."
        )


Part = int | str
"""A schema, by its object's id, or a rule or terminal by its name."""


@dataclass(slots=True)
class _Visit:
    """State of one part in the depth-first search.

    left: links not followed yet. longest: most references found behind the part. cost: 1 if a
    reference led to it, else 0.
    """

    part: Part
    left: Iterator[tuple[Part, int]]
    longest: int
    cost: int


class Links:
    """Graph of a schema's or grammar's parts.

    An edge costs 1 for a reference and 0 for containment.
    """

    def __init__(self) -> None:
        self._links: dict[Part, list[tuple[Part, int]]] = {}
        self._schemas: list[Mapping[str, Any]] = []  # held: an id is another object's later

    def longest(self, starts: Iterable[Part]) -> int:
        """Return the most references on a path from any of `starts`.

        Where parts refer to each other in a cycle, this is the longest path that one depth-first
        search finds without visiting a part twice.
        """
        lengths: dict[Part, int] = {}  # longest path from each part
        for start in starts:
            if start not in lengths:
                self._visit(start, lengths)
        return max(lengths.values(), default=0)

    def _visit(self, start: Part, lengths: dict[Part, int]) -> None:
        way, is_on_way = [self._begun(start, 0)], {start}
        while way:
            visit = way[-1]
            for other, cost in visit.left:
                if other in lengths:
                    visit.longest = max(visit.longest, cost + lengths[other])
                elif other not in is_on_way:
                    way.append(self._begun(other, cost))
                    is_on_way.add(other)
                    break
            else:
                way.pop()
                is_on_way.remove(visit.part)
                lengths[visit.part] = visit.longest
                if way:
                    way[-1].longest = max(way[-1].longest, visit.cost + visit.longest)

    def _begun(self, part: Part, cost: int) -> _Visit:
        return _Visit(part, iter(self._links.get(part, ())), 0, cost)

    def add_schema(self, root: Mapping[str, Any]) -> Part:
        """Add a JSON schema, as far as references lead from its root."""
        named: dict[str, Mapping[str, Any]] | None = None
        left = [root]
        while left:
            schema = left.pop()
            if id(schema) in self._links:
                continue
            self._schemas.append(schema)
            inside = list(_inside(schema))
            links = [(id(each), 0) for each in inside]
            left += inside
            for reference in (schema.get(key) for key in _REFERENCES):
                if isinstance(reference, str):
                    named = _named(root) if named is None else named
                    target = _target(root, named, reference)
                    if target is not None:
                        links.append((id(target), 1))
                        left.append(target)
            self._links[id(schema)] = list(links)
        return id(root)

    def add_grammar(self, grammar: str) -> list[Part]:
        """Add the rules and terminals of a Lark grammar."""
        uses: dict[str, list[Part]] = {}
        user: list[Part] = []  # names that the current rule uses
        place = 0
        while part := _LARK.search(grammar, place):
            place = part.end()
            if part["json"]:
                value, place = _json_at(grammar, place)
                if part["json"] == "%json" and isinstance(value, Mapping):
                    user.append(self.add_schema(value))
            elif part["statement"]:
                user = []
            elif (name := part["name"]) and _IS_DEFINED.match(grammar, place):
                user = uses.setdefault(name, [])
            elif name:
                user.append(name)
        for name, used in uses.items():
            known = (each for each in used if isinstance(each, int) or each in uses)
            self._links[name] = [(each, isinstance(each, str)) for each in known]
        return list(uses)


def _inside(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the schemas that a schema contains."""
    for key, value in schema.items():
        if key in _NOT_INSIDE:
            continue
        inner = [value]
        if isinstance(value, Mapping) and key in _MAPS:
            inner = list(value.values())
        elif isinstance(value, list):
            inner = value
        yield from (each for each in inner if isinstance(each, Mapping))


def _named(root: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Map identifiers, and anchors after a #, to their schemas."""
    named: dict[str, Mapping[str, Any]] = {}
    left: list[Any] = [root]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            for key, sign in (("$id", ""), ("id", ""), ("$anchor", "#"), ("$dynamicAnchor", "#")):
                if isinstance(value.get(key), str):
                    named.setdefault(sign + value[key].rpartition("/")[2].rstrip("#"), value)
            left += value.values()
        elif isinstance(value, list):
            left += value
    return named


def _target(
    root: Mapping[str, Any], named: Mapping[str, Mapping[str, Any]], reference: str
) -> Mapping[str, Any] | None:
    """Return the schema that a reference names, or None if it is not in this document."""
    base, _, fragment = unquote(reference).partition("#")
    value: Any = named.get(base.rpartition("/")[2]) if base else root
    if fragment and not fragment.startswith("/"):
        value = named.get(f"#{fragment}")
    elif fragment:
        for key in fragment[1:].split("/"):
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(value, Mapping):
                value = value.get(key)
            elif isinstance(value, list) and key.isdecimal() and int(key[:9]) < len(value):
                value = value[int(key[:9])]
            else:
                return None
    return value if isinstance(value, Mapping) else None


def _json_at(grammar: str, place: int) -> tuple[object, int]:
    """Read the JSON value after `place`; return it and its end.

    Invalid JSON is left for llguidance to report.
    """
    blanks = _BLANKS.match(grammar, place)
    try:
        return json.JSONDecoder().raw_decode(grammar, blanks.end() if blanks else place)
    except ValueError:
        return None, place
    except RecursionError:
        raise UsageError("A JSON schema in the grammar is nested too deeply; flatten it.") from None
