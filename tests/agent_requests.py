"""Requests with the fields, forms and lengths of those that coding agents send, not their texts."""

from __future__ import annotations

import json
from typing import Any

PATCH_GRAMMAR = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: "*** Update File: " filename LF ("@@" LF)? change+
filename: /(.+)/
change: ("+" | "-" | " ") /(.*)/ LF
%import common.LF
"""


def words(num_chars: int) -> str:
    return ("lorem ipsum " * (num_chars // 12 + 1))[:num_chars]


def _parameters(*names: str) -> dict[str, Any]:
    properties = {name: {"type": "string", "description": words(120)} for name in names}
    return {
        "type": "object",
        "properties": properties,
        "required": list(names[:1]),
        "additionalProperties": False,
    }


def _codex_function(name: str) -> dict[str, Any]:
    return {
        "type": "function",
        "name": name,
        "description": words(300),
        "strict": False,
        "parameters": _parameters("cmd", "workdir", "yield_time_ms"),
    }


APPLY_PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": words(200),
    "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
}

CODEX_TOOLS: list[dict[str, Any]] = [
    _codex_function("exec_command"),
    _codex_function("write_stdin"),
    APPLY_PATCH,
    {
        "type": "namespace",
        "name": "collab",
        "description": words(400),
        "tools": [_codex_function("spawn_agent"), _codex_function("wait")],
    },
    {"type": "web_search", "external_web_access": False},
]


def _message(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


CODEX_FIRST_INPUT: list[dict[str, Any]] = [
    _message("developer", words(9000)),
    _message("user", words(3000)),
    _message("user", "Repair the test."),
]


def codex_request(more: list[dict[str, Any]] | None = None, **fields: Any) -> dict[str, Any]:
    """Of codex-cli 0.169 with a custom provider. more: items behind the first three."""
    body = {
        "model": "some-model",
        "input": [*CODEX_FIRST_INPUT, *(more or [])],
        "tools": CODEX_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199f1a2-0000-7000-8000-000000000000",
        "client_metadata": {"session_id": "0199f1a2", "turn_id": "1"},
    }
    return {**body, **fields}


def codex_lite_request() -> dict[str, Any]:
    """The same where all tools arrive among the items."""
    namespace = {"type": "namespace", "name": "functions", "tools": CODEX_TOOLS[:3]}
    tools = {"type": "additional_tools", "role": "developer", "tools": [namespace]}
    body = codex_request()
    del body["tools"]
    return {**body, "input": [tools, *CODEX_FIRST_INPUT]}


def _claude_tool(name: str) -> dict[str, Any]:
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", **_parameters("path", "text")}
    return {"name": name, "description": words(2500), "input_schema": schema}


_EPHEMERAL = {"type": "ephemeral"}


def claude_request(turn: int = 1, **fields: Any) -> dict[str, Any]:
    """Of claude-code 2.1.330. turn: the second has the first's words in other forms, and more."""
    billing = f"x-anthropic-billing-header: cc_version=2.1.330.a{turn}; cch=0000{turn};"
    first: list[dict[str, Any]] = [
        {"type": "text", "text": words(600)},
        {"type": "text", "text": "Repair the test."},
    ]
    if turn == 1:  # it moves to the newest message
        first[-1]["cache_control"] = _EPHEMERAL
    system: Any = words(500) if turn == 1 else [{"type": "text", "text": words(500)}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": first},
        {"role": "system", "content": system},
    ]
    if turn > 1:
        messages += CLAUDE_ANSWER
    body = {
        "model": "claude-sonnet-5",
        "max_tokens": 32_000,
        "system": [
            {"type": "text", "text": billing},
            {"type": "text", "text": words(60), "cache_control": _EPHEMERAL},
            {"type": "text", "text": words(9000), "cache_control": _EPHEMERAL},
        ],
        "messages": messages,
        "tools": [_claude_tool(f"Tool{i}") for i in range(12)],
        "thinking": {"type": "adaptive", "display": "omitted"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": json.dumps({"device_id": "0" * 64})},
        "stream": True,
    }
    return {**body, **fields}


CLAUDE_ANSWER: list[dict[str, Any]] = [
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Look first.", "signature": ""},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "call_1", "name": "Tool1", "input": {"path": "a.py"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "call_1",
                "content": [{"type": "text", "text": "1 failed"}],
                "is_error": True,
                "cache_control": _EPHEMERAL,
            },
            {"type": "text", "text": "<system-reminder>be brief</system-reminder>"},
        ],
    },
]
