"""What the messages of a conversation may hold, as a model's chat template reads them.

Plain ones have a role and a content. An assistant's may have the thoughts before it
(`reasoning_content`) and calls of tools (`tool_calls`), a tool's the call that it answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lowtide.errors import UsageError

ROLES = ("system", "user", "assistant", "tool")

Message = Mapping[str, Any]


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """A conversation in one form: contents are texts, calls' arguments mappings, and nothing is
    None. Raises UsageError for what no template could read."""
    if not isinstance(messages, list | tuple) or not messages:
        raise UsageError("A conversation must be a list of at least one message.")
    return [_checked_message(message, i) for i, message in enumerate(messages)]


def with_later_systems_as_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation for a template that has a system turn at its beginning alone: later
    ones are the user's, joined to what the user says beside them."""
    joined = messages[:1]
    for message in messages[1:]:
        if message["role"] == "system":
            message = {"role": "user", "content": message["content"]}
        if message["role"] == joined[-1]["role"] == "user":
            content = joined[-1]["content"] + "\n\n" + message["content"]
            joined[-1] = {"role": "user", "content": content}
        else:
            joined.append(message)
    return joined


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
    """The other fields of a message, which are texts."""
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
    """The text of OpenAI's content parts, part by line; anything else as it is."""
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
