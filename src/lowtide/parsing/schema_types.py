"""What a JSON schema says of values: the one reading of types, for grammars and for answers.

References within the schema are followed; `allOf`, `anyOf`, `oneOf`, `enum`, `const`, `nullable`
and keywords of one type alone are read. Nothing here recurses: a schema is a request's.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

ALL_KINDS = frozenset(("string", "integer", "number", "boolean", "null", "array", "object"))

MAX_NODES = 20_000
"""Parts of a schema that are looked at; all others may be anything."""

MAX_CHOICES = 100_000
"""Values that are compared where parts of a schema join their lists of them; behind those a part
may be any of its types."""

_KEYWORDS = {
    "string": ("pattern", "minLength", "maxLength", "format"),
    "object": ("properties", "required", "patternProperties", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""Where a schema names no type: keywords that have a meaning for one type alone."""


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
"""Names of types in tools that were not declared in JSON Schema's words."""


class ValueType(NamedTuple):
    """What a value may be. kinds: its JSON types, `integer` beside `number` where it may be one;
    choices: the only values, where a schema lists them.
    """

    kinds: frozenset[str] = ALL_KINDS
    choices: tuple[Any, ...] | None = None

    @property
    def is_text(self) -> bool:
        """Whether it may be a string."""
        return "string" in self.kinds


ANY = ValueType()
TEXT = ValueType(frozenset(("string",)))
_NONE = ValueType(frozenset(), ())


class SchemaTypes:
    """Reads the parts of one schema. Owns what was read of it."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._known: dict[int, tuple[object, ValueType]] = {}  # with the part: it keeps its id
        self._num_compared = 0  # choices

    def of(self, schema: object) -> ValueType:
        """What a part of the schema allows; where it refers to itself, anything."""
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
        """The schemas of an object's members by name, wherever the schema lists them."""
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

    def required(self) -> set[str]:
        """The names of members that an object must have."""
        lists = [node.get("required") for node in self._parts(("allOf",))]
        return {
            name
            for names in lists
            if isinstance(names, list)
            for name in names
            if isinstance(name, str)
        }

    def takes_others(self) -> bool:
        """Whether the schema says that there may be other members than those it names."""
        for node in self._parts(("allOf", "anyOf", "oneOf")):
            if node.get("additionalProperties") not in (None, False) or "patternProperties" in node:
                return True
        return False

    def names_members(self) -> bool:
        """Whether the schema lists members at all, and be it none."""
        parts = self._parts(("allOf", "anyOf", "oneOf"))
        return any(isinstance(node.get("properties"), Mapping) for node in parts)

    def whole(self, schema: object) -> object:
        """A part of the schema as one of its own, whose references still refer to the same."""
        text, root = json.dumps(schema), self._root
        if not isinstance(schema, Mapping) or '"$ref": "#' not in text:
            return schema
        # No text in JSON holds a quote that is not escaped: only keys are found.
        moved = json.dumps(root).replace('"$ref": "#', '"$ref": "#/$defs/root')
        part = json.loads(text.replace('"$ref": "#', '"$ref": "#/$defs/root'))
        return {**part, "$defs": {"root": json.loads(moved)}}

    def alternatives(self, schema: object) -> list[object]:
        """The schemas one of which a value is of, by `anyOf` or `oneOf`; else none."""
        for node in self._parts(("allOf",), schema):
            for name in ("anyOf", "oneOf"):
                if isinstance(node.get(name), list) and node[name]:
                    return list(node[name])
        return []

    def keywords(self, schema: object, names: Sequence[str]) -> list[tuple[str, Any]]:
        """What a part, and what it refers to, says by some keywords."""
        parts = self._parts(("allOf",), schema)
        return [(name, node[name]) for node in parts for name in names if name in node]

    def _parts(self, joined_by: Sequence[str], schema: object = None) -> list[Mapping[str, Any]]:
        """A part of the schema, or all of it; what it refers to, and what these keywords join."""
        found: list[Mapping[str, Any]] = []
        left, seen = deque([self._root if schema is None else schema]), set[int]()
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
        """What is known of a part; None where a step was begun that will tell."""
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
        """What a part allows; yields other parts and is sent what they allow."""
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
        """What a value of both is."""
        choices = one.choices if other.choices is None else other.choices
        if one.choices is not None and other.choices is not None:
            choices = None
            if self._may_compare(len(one.choices) + len(other.choices)):
                among = set(map(value_key, other.choices))
                choices = tuple(each for each in one.choices if value_key(each) in among)
        return ValueType(one.kinds & other.kinds, choices)

    def _either(self, several: Sequence[ValueType]) -> ValueType:
        """What a value of one of them is."""
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
    """What the keywords of one part say without its other parts."""
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
    """The JSON types of a value."""
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
    """Whether a value is of one of some types."""
    return bool(_kinds_of(value) & kinds)


def value_key(value: object) -> str:
    """What is the same of two JSON values that are equal: other than in Python, true is not 1."""
    try:
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):  # nested too deeply: equal to itself alone
        return f"at {id(value)}"


def _referred(root: object, reference: str) -> object:
    """The part that a reference within a schema names, else one that allows anything."""
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
