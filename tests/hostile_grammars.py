"""Schemas and grammars that end or starve who compiles them, and the doors they come by."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

Body = dict[str, Any]
MESSAGES = [{"role": "user", "content": "47 + 85"}]


def schema_chain(num_links: int, link: Callable[[Body], Body]) -> Body:
    """A schema of so many references, each in what `link` makes of it."""
    names = [f"d{i}" for i in range(num_links)]
    defined = {
        name: link({"$ref": f"#/$defs/{other}"}) for name, other in itertools.pairwise(names)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**defined, names[-1]: {"type": "string"}}}


SCHEMA_LINKS: dict[str, Callable[[Body], Body]] = {
    "references": lambda other: other,
    "all of": lambda other: {"allOf": [other]},
    "any of": lambda other: {"anyOf": [{"type": "null"}, other]},
    "one of": lambda other: {"oneOf": [{"type": "null"}, other]},
    "properties": lambda other: {"type": "object", "properties": {"a": other}, "required": ["a"]},
    "optional properties": lambda other: {"type": "object", "properties": {"default": other}},
    "patterns": lambda other: {"type": "object", "patternProperties": {"^a": other}},
    "other properties": lambda other: {"type": "object", "additionalProperties": other},
    "items": lambda other: {"type": "array", "items": other, "minItems": 1},
    "first items": lambda other: {"type": "array", "prefixItems": [other], "minItems": 1},
    "siblings": lambda other: {**other, "type": ["string", "object", "array"]},
    "deeper": lambda other: {"allOf": [{"anyOf": [{"properties": {"enum": other}}]}]},
}


def rule_chain(num_links: int, link: str, name: str, end: str = '"x"') -> str:
    """A Lark grammar of so many references, each in `link` in place of OTHER."""
    rules = [f"start: {name}1"]
    rules += [f"{name}{i}: {link.replace('OTHER', f'{name}{i + 1}')}" for i in range(1, num_links)]
    return "\n".join([*rules, f"{name}{num_links}: {end}"])


RULE_LINKS: dict[str, tuple[str, str]] = {
    "rules": ("OTHER", "r"),
    "rules with text": ('"a" OTHER', "r"),
    "choices": ('OTHER\n | "b" | "c: d"', "r"),
    "groups": ('("a" | [OTHER])?', "r"),
    "repeats": ("OTHER+", "r"),
    "commented": ("OTHER // r0: r1\n # more", "r"),
    "terminals": ("OTHER", "T"),
    "terminals with text": ('"a" OTHER /b/', "T"),
    "choices of terminals": ('OTHER | "b"', "T"),
    "intersections": ("OTHER & /x+/", "T"),
    "complements": ("~OTHER", "T"),
}

PATTERNS = [f"(.*[a-{chr(98 + i % 20)}]{i % 7 + 1}.*){{3}}" for i in range(200)]
SCHEMAS_WITHOUT_A_CHAIN: dict[str, Body] = {
    "sixty patterns": {"type": "string", "allOf": [{"pattern": each} for each in PATTERNS[:60]]},
    "long repeats": {"type": "string", "pattern": "(" * 6 + "a{90}" + "){90}" * 6},
    "products": {
        "allOf": [{"anyOf": [{"pattern": f"{a}.*{b}{{9}}"} for a in "abcdef"]} for b in "uvwxyz"]
    },
}
GRAMMARS_WITHOUT_A_CHAIN: dict[str, str] = {
    "200 expressions": "start: A\nA: " + " & ".join(f"/{each}/" for each in PATTERNS),
    "nested groups": "start: " + "(" * 100_000 + '"a"' + ")" * 100_000,
    "nested terminals": "start: A\nA: " + "(" * 100_000 + '"a"' + ")" * 100_000,
    "nested options": "start: " + "[" * 60_000 + '"a"' + "]" * 60_000,
    "complements": "start: A\nA: " + "~(" * 80_000 + '"a"' + ")" * 80_000,
    "a deep schema": "start: %json " + '{"items": ' * 20_000 + "{}" + "}" * 20_000,
}
EXPRESSIONS: dict[str, str] = {
    "nested groups": "(" * 4000 + "a" + ")" * 4000,
    "repeats of repeats": "(((((((a{1,90}){1,90}){1,90}){1,90}){1,90}){1,90}){1,90}){1,90}",
    "classes": r"[\p{L}--[a-z]]{1,4000}" * 300,
}


def _function(parameters: Body, **fields: Any) -> Body:
    return {"name": "f", "description": "", "parameters": parameters, **fields}


def _chat(**fields: Any) -> tuple[str, Body]:
    return "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 8, **fields}


def _ollama(**fields: Any) -> tuple[str, Body]:
    body = {"model": "model", "messages": MESSAGES, "options": {"num_predict": 8}}
    return "/api/chat", {**body, "stream": False, **fields}


def _responses(**fields: Any) -> tuple[str, Body]:
    return "/v1/responses", {"input": "47 + 85", "max_output_tokens": 8, **fields}


def _anthropic(**fields: Any) -> tuple[str, Body]:
    return "/v1/messages", {"messages": MESSAGES, "max_tokens": 8, **fields}


def _custom(syntax: str, text: str) -> tuple[str, Body]:
    form = {"type": "grammar", "syntax": syntax, "definition": text}
    return _responses(
        tools=[{"type": "custom", "name": "f", "format": form}], tool_choice="required"
    )


SCHEMA_DOORS: Mapping[str, Callable[[Body], tuple[str, Body]]] = {
    "chat, response_format": lambda schema: _chat(
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    ),
    "chat, structured_outputs": lambda schema: _chat(structured_outputs={"json": schema}),
    "chat, required": lambda schema: _chat(
        tools=[{"type": "function", "function": _function(schema)}], tool_choice="required"
    ),
    "chat, strict": lambda schema: _chat(
        tools=[{"type": "function", "function": _function(schema, strict=True)}]
    ),
    "ollama, format": lambda schema: _ollama(format=schema),
    "responses, text.format": lambda schema: _responses(
        text={"format": {"type": "json_schema", "name": "a", "schema": schema}}
    ),
    "responses, required": lambda schema: _responses(
        tools=[{"type": "function", **_function(schema)}], tool_choice="required"
    ),
    "anthropic, any": lambda schema: _anthropic(
        tools=[{"name": "f", "input_schema": schema}], tool_choice={"type": "any"}
    ),
    "anthropic, output_config": lambda schema: _anthropic(
        output_config={"format": {"type": "json_schema", "schema": schema}}
    ),
}
LARK_DOORS: Mapping[str, Callable[[str], tuple[str, Body]]] = {
    "chat, grammar": lambda text: _chat(structured_outputs={"grammar": text}),
    "responses, custom": lambda text: _custom("lark", text),
}
REGEX_DOORS: Mapping[str, Callable[[str], tuple[str, Body]]] = {
    "chat, regex": lambda text: _chat(structured_outputs={"regex": text}),
    "responses, custom": lambda text: _custom("regex", text),
}


AUTO_DOORS: Mapping[str, Callable[[Body], tuple[str, Body]]] = {
    "chat": lambda schema: _chat(tools=[{"type": "function", "function": _function(schema)}]),
    "ollama": lambda schema: _ollama(tools=[{"type": "function", "function": _function(schema)}]),
    "responses": lambda schema: _responses(tools=[{"type": "function", **_function(schema)}]),
    "anthropic": lambda schema: _anthropic(tools=[{"name": "f", "input_schema": schema}]),
}
"""By which tools come that need not be called."""
