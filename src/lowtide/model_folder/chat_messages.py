"""Messages of a conversation, checked and prepared for a chat template.

Plain messages have a role and a content. An assistant's may also have thoughts
(`reasoning_content`) and tool calls (`tool_calls`), a tool's the call that it answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from lowtide.errors import UsageError

ROLES = ("system", "user", "assistant", "tool")

Message = Mapping[str, Any]


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """Check a conversation and normalise it: contents are texts, calls' arguments mappings.

    None values are dropped. Raises UsageError for messages that no template could read.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise UsageError("A conversation must be a list of at least one message.")
    return [_checked_message(message, i) for i, message in enumerate(messages)]


def forms(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the conversation in forms for templates with fewer roles or strict turns.

    The first is the conversation itself; each form occurs once, those with fewer changes first.
    Later system turns may become the user's, then also the first one; adjacent turns of one role
    may be joined, and a user who says nothing may come before an answer that nothing precedes.
    """
    later, every = _as_users(messages, 1), _as_users(messages, 0)
    found: list[list[dict[str, Any]]] = []
    for form in (messages, later, every):
        for each in (form, _in_turn(form), _after_user(_in_turn(form))):
            if each not in found:
                found.append(each)
    return found


def in_short(message: dict[str, Any], mark: str) -> dict[str, Any]:
    """Replace a message's texts by `mark`, to test what a template does with it."""
    short = {**message, "content": mark if message["content"] else ""}
    if "reasoning_content" in message:
        short["reasoning_content"] = mark
    if "tool_calls" in message:
        short["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": {}}}
            for call in message["tool_calls"]
        ]
    return short


def with_thinking(
    messages: list[dict[str, Any]], in_place_of_content: bool = False
) -> list[dict[str, Any]]:
    """Add gpt-oss's name for thoughts.

    in_place_of_content: with a call, the content becomes the end of the thoughts, since the
    template takes only one of them there.
    """
    return [_with_thinking(message, in_place_of_content) for message in messages]


def without_empty_end(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop a last answer that is empty. Raises UsageError if it cannot be continued."""
    *before, last = messages
    if last["role"] != "assistant":
        return messages
    if "tool_calls" in last:
        raise UsageError(
            f"Message {len(before)}, the last one, calls tools: add a message of each tool's "
            "result, or leave the calls out."
        )
    if last["content"]:
        return messages
    if "reasoning_content" in last:
        raise UsageError(
            f"Message {len(before)}, the last one, is an assistant's thoughts alone, which cannot "
            "be continued; leave it out, or begin the answer after them."
        )
    if not before:
        raise UsageError("A conversation must be a list of at least one message that says a word.")
    return before if before[-1]["role"] != "assistant" else without_empty_end(before)


def _as_users(messages: list[dict[str, Any]], start: int) -> list[dict[str, Any]]:
    """Turn system messages from `start` on into the user's, joined to adjacent user messages."""
    found: list[dict[str, Any]] = []
    run: list[str] = []  # texts of one user turn
    was_system = False
    for i, message in enumerate(messages):
        is_system = i >= start and message["role"] == "system"
        is_user = is_system or message["role"] == "user"
        if run and not (is_user and (is_system or was_system)):
            found.append({"role": "user", "content": "".join(run)})
            run = []
        if run:  # one newline after the first system turn, as in llama.cpp
            run.append("\n" if i == 1 and was_system else "\n\n")
        if is_user:
            run.append(message["content"])
        else:
            found.append(message)
        was_system = is_system
    return [*found, {"role": "user", "content": "".join(run)}] if run else found


def _in_turn(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join adjacent messages of one role; tools' results stay separate."""
    found: list[dict[str, Any]] = []
    for role, turns in groupby(messages, lambda message: message["role"]):
        same = list(turns)
        found += same if role == "tool" or len(same) == 1 else [_joined_turns(same)]
    return found


def _after_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put an empty user turn before an answer that begins the conversation."""
    place = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    if [message["role"] for message in messages[place : place + 1]] != ["assistant"]:
        return messages
    return [*messages[:place], {"role": "user", "content": ""}, *messages[place:]]


def _joined_turns(messages: list[dict[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {"role": messages[0]["role"]}
    for name in ("content", "reasoning_content"):
        if any(name in message for message in messages):
            joined[name] = "\n".join(text for message in messages if (text := message.get(name)))
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    return joined | {"tool_calls": calls} if calls else joined


def _with_thinking(message: dict[str, Any], in_place_of_content: bool) -> dict[str, Any]:
    thoughts = message.get("reasoning_content")
    if thoughts is None:
        return message
    if in_place_of_content and "tool_calls" in message and message["content"]:
        return message | {"content": "", "thinking": f"{thoughts}\n\n{message['content']}"}
    return message | {"thinking": thoughts}


def _checked_message(message: object, index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UsageError(f"Message {index} must have a role and a content, not be {message!r:.80}.")
    given = {name: value for name, value in message.items() if value is not None}
    role = given.pop("role", None)
    calls = _checked_calls(given.pop("tool_calls", []), index)
    content = _joined_parts(given.pop("content", "" if calls else None), index)
    for name, value in (("role", role), ("content", content)):
        if not isinstance(value, str):
            raise UsageError(f"Message {index} needs a string {name}, not {value!r:.80}.")
    if role not in ROLES:
        raise UsageError(
            f"Message {index} has the role {role!r:.80}; known roles: {', '.join(ROLES)}."
        )
    checked: dict[str, Any] = {"role": role, "content": content}
    if calls:
        checked["tool_calls"] = calls
    checked |= _checked_texts(given, role, index)
    if calls and role != "assistant":
        raise UsageError(f"Message {index} has tool_calls, and only an assistant's may.")
    return checked


def _checked_texts(given: Mapping[object, object], role: object, index: int) -> dict[str, str]:
    """Check the remaining fields of a message, which are texts."""
    names = {
        "assistant": ("reasoning_content", "reasoning"),
        "tool": ("tool_call_id", "name"),
    }.get(str(role), ())
    unknown = sorted(str(name) for name in given if name not in names)
    if unknown:
        raise UsageError(f"Message {index} has fields that are not known: {', '.join(unknown)}.")
    texts = {}
    for name in names:
        value = given.get(name, "")
        if not isinstance(value, str):
            raise UsageError(f"Message {index} needs a string {name}, not {value!r:.80}.")
        if value:
            texts["reasoning_content" if name == "reasoning" else name] = value
    return texts


def _joined_parts(content: object, index: int) -> object:
    """Join the text of OpenAI's content parts by lines; return anything else unchanged."""
    if not isinstance(content, list | tuple):
        return content
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(text, str):
            raise UsageError(
                f"Message {index} has a part {part!r:.80}; only text is read: "
                '{"type": "text", "text": ...}.'
            )
        texts.append(text)
    return "\n".join(texts)


def _checked_calls(calls: object, index: int) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise UsageError(f"Message {index} needs a list tool_calls, not {calls!r:.80}.")
    return [_checked_call(call, f"Message {index}, tool call {i},") for i, call in enumerate(calls)]


def _checked_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise UsageError(
            f'{where} must be {{"type": "function", "id": ..., "function": {{"name": ..., '
            f'"arguments": ...}}}}, not {call!r:.80}.'
        )
    name, arguments = function.get("name"), _arguments(function.get("arguments", {}))
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise UsageError(
            f"{where} needs a string name and arguments that are a JSON object or its text, not "
            f"{name!r:.80} and {function.get('arguments')!r:.80}."
        )
    checked = {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
    call_id = call.get("id")
    if call_id is not None and not isinstance(call_id, str):
        raise UsageError(f"{where} needs a string id, not {call_id!r:.80}.")
    return checked if call_id is None else checked | {"id": call_id}


def _arguments(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return None
