"""Types that a JSON schema allows: one reading for both grammars and answers.

References within the schema are followed; `allOf`, `anyOf`, `oneOf`, `enum`, `const`, `nullable`
and keywords that imply one type are read. Nothing here recurses: schemas come from requests.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple
from urllib.parse import unquote

ALL_KINDS = frozenset(("string", "integer", "number", "boolean", "null", "array", "object"))

MAX_NODES = 20_000
"""Most parts of a schema that are read; all others may be anything."""

MAX_CHOICES = 100_000
"""Most listed values that are compared; beyond them only their types count."""

_KEYWORDS = {
    "string": ("pattern", "minLength", "maxLength", "format"),
    "object": ("properties", "required", "patternProperties", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""Keywords that imply a type where a schema names none."""


_OTHER_NAMES = {
    **dict.fromkeys(("str", "text", "char", "varchar", "enum"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "long"), "integer"),
    **dict.fromkeys(("float", "double", "num"), "number"),
    "bool": "boolean",
    "dict": "object",
    "map": "object",
    "list": "array",
    "tuple": "array",
}
"""Other names of types in tool declarations, mapped to JSON Schema's."""


class ValueType(NamedTuple):
    """Values that a schema allows.

    kinds: JSON types, with `integer` beside `number` if integers are allowed.
    choices: the only values, if the schema lists them.
    """

    kinds: frozenset[str] = ALL_KINDS
    choices: tuple[Any, ...] | None = None

    @property
    def is_text(self) -> bool:
        """True if a string is allowed."""
        return "string" in self.kinds


ANY = ValueType()
TEXT = ValueType(frozenset(("string",)))
_NONE = ValueType(frozenset(), ())


class SchemaTypes:
    """Reader of one schema; caches the parts it has read."""

    def __init__(self, root: object) -> None:
        self._root = self._start = root
        self._known: dict[int, tuple[object, ValueType]] = {}  # with the part: it keeps its id
        self._num_compared = 0  # choices

    def of(self, schema: object) -> ValueType:
        """Return the values that a part allows; a part that refers to itself allows anything."""
        steps: list[tuple[object, Generator[object, ValueType, ValueType]]] = []
        found: ValueType | None = self._begun(schema, steps)
        while steps:
            node, step = steps[-1]
            try:
                inner = next(step) if found is None else step.send(found)
            except StopIteration as end:
                steps.pop()
                found = end.value
                self._known[id(node)] = node, end.value
            else:
                found = self._begun(inner, steps)
        return ANY if found is None else found

    def parameters(self) -> dict[str, object]:
        """Map an object's member names to schemas, wherever the schema lists them."""
        certain = {id(node) for node in self._parts(("allOf",))}
        found: dict[str, tuple[list[object], list[object]]] = {}
        for node in self._parts(("allOf", "anyOf", "oneOf")):
            members = node.get("properties")
            if isinstance(members, Mapping):
                for name, schema in members.items():
                    ours, others = found.setdefault(name, ([], []))
                    (ours if id(node) in certain else others).append(schema)
        joined = {}
        for name, (ours, others) in found.items():
            schemas = [*ours, {"anyOf": others}] if len(others) > 1 else [*ours, *others]
            joined[name] = schemas[0] if len(schemas) == 1 else {"allOf": schemas}
        return joined

    def inner_names(self) -> set[str]:
        """Return the names that the schema lists for members of any object in it."""
        names, left, num_seen = set[str](), [self._start], 0
        while left and num_seen < MAX_NODES:
            node, num_seen = left.pop(), num_seen + 1
            if isinstance(node, Mapping):
                members = node.get("properties")
                names |= members.keys() if isinstance(members, Mapping) else set()
                left += node.values()
            elif isinstance(node, list):
                left += node
        return names

    def required(self) -> set[str]:
        """Return the names of an object's required members."""
        lists = [node.get("required") for node in self._parts(("allOf",))]
        return {
            name
            for names in lists
            if isinstance(names, list)
            for name in names
            if isinstance(name, str)
        }

    def takes_others(self) -> bool:
        """Return True if the schema allows members that it does not name."""
        for node in self._parts(("allOf", "anyOf", "oneOf")):
            if node.get("additionalProperties") not in (None, False) or "patternProperties" in node:
                return True
        return False

    def names_members(self) -> bool:
        """Return True if the schema has a list of members, even an empty one."""
        parts = self._parts(("allOf", "anyOf", "oneOf"))
        return any(isinstance(node.get("properties"), Mapping) for node in parts)

    def inside(self, schema: object) -> SchemaTypes:
        """Return a reader of a part, whose references lead to the same places."""
        reader = copy(self)
        reader._start = schema
        return reader

    def whole(self, schema: object) -> object:
        """Make a part a schema of its own whose references still resolve."""
        text, root = json.dumps(schema), self._root
        if not isinstance(schema, Mapping) or '"$ref": "#' not in text:
            return schema
        # No text in JSON holds a quote that is not escaped: only keys are found.
        moved = json.dumps(root).replace('"$ref": "#', '"$ref": "#/$defs/root')
        part = json.loads(text.replace('"$ref": "#', '"$ref": "#/$defs/root'))
        return {**part, "$defs": {"root": json.loads(moved)}}

    def alternatives(self, schema: object) -> list[object]:
        """Return the schemas of `anyOf` or `oneOf`, or none."""
        for node in self._parts(("allOf",), schema):
            for name in ("anyOf", "oneOf"):
                if isinstance(node.get(name), list) and node[name]:
                    return list(node[name])
        return []

    def keywords(self, schema: object, names: Sequence[str]) -> list[tuple[str, Any]]:
        """Return the values of some keywords in a part and the parts it refers to."""
        parts = self._parts(("allOf",), schema)
        return [(name, node[name]) for node in parts for name in names if name in node]

    def _parts(self, joined_by: Sequence[str], schema: object = None) -> list[Mapping[str, Any]]:
        """Collect a part (by default the first) with the parts that it refers to or joins."""
        found: list[Mapping[str, Any]] = []
        left, seen = deque([self._start if schema is None else schema]), set[int]()
        while left and len(seen) < MAX_NODES:
            node = left.popleft()
            if not isinstance(node, Mapping) or id(node) in seen:
                continue
            seen.add(id(node))
            found.append(node)
            if _is_str(node.get("$ref")):
                left.append(_referred(self._root, node["$ref"]))
            for name in joined_by:
                joined = node.get(name)
                left += joined if isinstance(joined, list) else []
        return found

    def _begun(
        self,
        schema: object,
        steps: list[tuple[object, Generator[object, ValueType, ValueType]]],
    ) -> ValueType | None:
        """Return the known type of a part, or push a step that will read it and return None."""
        if schema is False:
            return _NONE
        if not isinstance(schema, Mapping) or len(self._known) >= MAX_NODES:
            return ANY
        if id(schema) in self._known:
            return self._known[id(schema)][1]
        self._known[id(schema)] = schema, ANY  # while it is read
        steps.append((schema, self._read(schema)))
        return None

    def _read(self, schema: Mapping[str, Any]) -> Generator[object, ValueType, ValueType]:
        """Read a part; yields other parts and receives their types."""
        found = _own(schema)
        if _is_str(schema.get("$ref")):
            found = self._both(found, (yield _referred(self._root, schema["$ref"])))
        all_of = schema.get("allOf")
        for each in all_of if isinstance(all_of, list) else ():
            found = self._both(found, (yield each))
        for name in ("anyOf", "oneOf"):
            alternatives = schema.get(name)
            if isinstance(alternatives, list) and alternatives:
                several = []
                for each in alternatives:
                    several.append((yield each))
                found = self._both(found, self._either(several))
        if schema.get("nullable") is True:  # OpenAPI's word
            found = self._either([found, ValueType(frozenset(("null",)), (None,))])
        return found if found.kinds else ANY

    def _both(self, one: ValueType, other: ValueType) -> ValueType:
        """Intersect two types."""
        choices = one.choices if other.choices is None else other.choices
        if one.choices is not None and other.choices is not None:
            choices = None
            if self._may_compare(len(one.choices) + len(other.choices)):
                among = set(map(value_key, other.choices))
                choices = tuple(each for each in one.choices if value_key(each) in among)
        return ValueType(one.kinds & other.kinds, choices)

    def _either(self, several: Sequence[ValueType]) -> ValueType:
        """Unite several types."""
        kinds = frozenset[str]().union(*(each.kinds for each in several))
        lists = [each.choices for each in several if each.choices is not None]
        if len(lists) < len(several) or not self._may_compare(sum(map(len, lists))):
            return ValueType(kinds)
        distinct = {value_key(each): each for choices in lists for each in choices}
        return ValueType(kinds, tuple(distinct.values()))

    def _may_compare(self, num_choices: int) -> bool:
        self._num_compared += num_choices
        return self._num_compared <= MAX_CHOICES


def _own(schema: Mapping[str, Any]) -> ValueType:
    """Read one part's own keywords, without the parts that it refers to."""
    named = schema.get("type")
    listed = named if isinstance(named, list) else [named]
    names = {_OTHER_NAMES.get(each, each) for each in listed if isinstance(each, str)}
    kinds = names & ALL_KINDS
    if "number" in kinds:
        kinds.add("integer")
    choices: tuple[Any, ...] | None = None
    if "const" in schema:
        choices = (schema["const"],)
    elif isinstance(schema.get("enum"), list):
        choices = tuple(schema["enum"])
    if choices is not None:
        ours = {kind for each in choices for kind in _kinds_of(each)}
        return ValueType(frozenset(kinds & ours if kinds and kinds & ours else ours), choices)
    if not kinds and not any(name in schema for name in ("$ref", "allOf", "anyOf", "oneOf")):
        kinds = {kind for kind, words in _KEYWORDS.items() if any(word in schema for word in words)}
        kinds |= {"integer"} if "number" in kinds else set()
    return ValueType(frozenset(kinds) or ALL_KINDS, (None,) if kinds == {"null"} else None)


def _kinds_of(value: object) -> set[str]:
    """Return the JSON types of a value."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"integer", "number"} if value.is_integer() else {"number"}
    if isinstance(value, str):
        return {"string"}
    return {"array"} if isinstance(value, list) else {"object"}


def fits(value: object, kinds: frozenset[str]) -> bool:
    """Return True if a value has one of the types."""
    return bool(_kinds_of(value) & kinds)


def value_key(value: object) -> str:
    """Return a key that equal JSON values share; unlike in Python, true is not 1."""
    try:
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):  # nested too deeply: equal to itself alone
        return f"at {id(value)}"


def _referred(root: object, reference: str) -> object:
    """Resolve a reference within a schema; an unknown one allows anything."""
    if not reference.startswith("#"):
        return {}
    node = root
    for part in unquote(reference[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping) and name in node:
            node = node[name]
        elif isinstance(node, list) and re.fullmatch(r"\d{1,9}", name) and int(name) < len(node):
            node = node[int(name)]
        else:
            return {}
    return node


def _is_str(value: object) -> bool:
    return isinstance(value, str)
