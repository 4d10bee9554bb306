"""Streams and responses of `/v1/responses` have the fields that Open Responses requires.

Each kind has its own (openresponses.org, version 2026-04-24).

Thoughts come as `response.reasoning_text.*`, which OpenAI's own clients read; the specification
calls these events `response.reasoning.*`. Custom tools and namespaces are OpenAI's alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any

import pytest
from agent_requests import codex_request
from scripted_serving import ScriptedService, done, events_of, listening
from test_serve_responses import ANSWER, post

from lowtide.errors import StorageError
from lowtide.parsing.pieces import CallArguments, CallBegun, Piece, Reasoning, Text

Fields = Mapping[str, type | tuple[type, ...]]
NUMBER = (int, float)

RESPONSE: Fields = {
    "id": str,
    "object": str,
    "created_at": int,
    "completed_at": (int, NoneType),
    "status": str,
    "incomplete_details": (dict, NoneType),
    "model": str,
    "previous_response_id": (str, NoneType),
    "instructions": (str, NoneType),
    "output": list,
    "error": (dict, NoneType),
    "tools": list,
    "tool_choice": (str, dict),
    "truncation": str,
    "parallel_tool_calls": bool,
    "text": dict,
    "top_p": NUMBER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "top_logprobs": int,
    "temperature": NUMBER,
    "reasoning": (dict, NoneType),
    "user": (str, NoneType),
    "usage": (dict, NoneType),
    "max_output_tokens": (int, NoneType),
    "max_tool_calls": (int, NoneType),
    "store": bool,
    "background": bool,
    "service_tier": str,
    "metadata": dict,
    "safety_identifier": (str, NoneType),
    "prompt_cache_key": (str, NoneType),
}
USAGE: Fields = {
    "input_tokens": int,
    "output_tokens": int,
    "total_tokens": int,
    "input_tokens_details": dict,
    "output_tokens_details": dict,
}
FUNCTION: Fields = {
    "name": str,
    "description": (str, NoneType),
    "parameters": (dict, NoneType),
    "strict": (bool, NoneType),
}
ITEMS: Mapping[str, Fields] = {
    "message": {"id": str, "status": str, "role": str, "content": list},
    "function_call": {"id": str, "call_id": str, "name": str, "arguments": str, "status": str},
    "custom_tool_call": {"id": str, "call_id": str, "name": str, "input": str},
    "reasoning": {"id": str, "summary": list},
}
PARTS: Mapping[str, Fields] = {
    "output_text": {"text": str, "annotations": list},
    "reasoning_text": {"text": str},
}

OF_ITEM: Fields = {"item_id": str, "output_index": int}
OF_PART: Fields = {**OF_ITEM, "content_index": int}
EVENTS: Mapping[str, Fields] = {
    **{
        f"response.{state}": {"response": dict}
        for state in ("created", "in_progress", "completed", "incomplete", "failed")
    },
    "response.output_item.added": {"output_index": int, "item": dict},
    "response.output_item.done": {"output_index": int, "item": dict},
    "response.content_part.added": {**OF_PART, "part": dict},
    "response.content_part.done": {**OF_PART, "part": dict},
    "response.output_text.delta": {**OF_PART, "delta": str},
    "response.output_text.done": {**OF_PART, "text": str},
    "response.reasoning_text.delta": {**OF_PART, "delta": str},
    "response.reasoning_text.done": {**OF_PART, "text": str},
    "response.function_call_arguments.delta": {**OF_ITEM, "delta": str},
    "response.function_call_arguments.done": {**OF_ITEM, "arguments": str},
    "response.custom_tool_call_input.delta": {**OF_ITEM, "delta": str},
    "response.custom_tool_call_input.done": {**OF_ITEM, "input": str},
}

CUT: list[Piece] = [
    Reasoning("Look."),
    CallBegun(0, "call_a", "exec_command"),
    CallArguments(0, '{"cmd": '),
    CallArguments(0, '"l'),
    done("length"),
]


def check(value: Mapping[str, Any], fields: Fields) -> None:
    missing = [name for name in fields if name not in value]
    assert not missing, (missing, value)
    for name, kind in fields.items():
        is_bool = isinstance(value[name], bool)
        assert isinstance(value[name], kind) and (not is_bool or kind is not int), (name, value)


def check_item(item: Mapping[str, Any]) -> None:
    check(item, ITEMS[item["type"]])
    assert item.get("status", "completed") in ("in_progress", "completed", "incomplete")
    for part in item.get("content", ()):
        check(part, PARTS[part["type"]])


def check_response(response: Mapping[str, Any]) -> None:
    check(response, RESPONSE)
    assert response["object"] == "response" and "type" in response["text"]["format"]
    assert set(response["reasoning"]) == {"effort", "summary"}
    for item in response["output"]:
        check_item(item)
    for tool in response["tools"]:
        if tool["type"] == "function":
            check(tool, FUNCTION)
    if response["usage"] is not None:
        check(response["usage"], USAGE)
    if response["error"] is not None:
        check(response["error"], {"code": str, "message": str})


ASKED = [
    {"input": "Hello."},
    {"input": "Hello.", "tools": [{"type": "function", "name": "exec_command"}]},
    codex_request(),
]


@pytest.mark.parametrize("asked", ASKED, ids=["plain", "a function", "codex"])
@pytest.mark.parametrize(
    ("script", "state"),
    [
        (ANSWER, "completed"),
        (CUT, "incomplete"),
        ([Text("so far"), StorageError("the disk is gone")], "failed"),
        ([done()], "completed"),
    ],
    ids=["an answer", "one that is cut", "one that fails", "an empty one"],
)
def test_events_and_objects_have_what_the_specification_requires(
    asked: dict[str, Any], script: list[Any], state: str
) -> None:
    with listening(ScriptedService(script)) as url:
        events = events_of(post(url, {**asked, "stream": True}).text)
        whole = post(url, {**asked, "stream": False})
    for number, event in enumerate(events):
        check(event, {**EVENTS[event["type"]], "sequence_number": int})
        assert event["sequence_number"] == number
        if "response" in event:
            check_response(event["response"])
        if "item" in event:
            check_item(event["item"])
        if "part" in event:
            check(event["part"], PARTS[event["part"]["type"]])
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{state}" and events[-1]["response"]["status"] == state
    if state != "failed":
        check_response(whole.json())
