"""A conversation as every API's requests are read into it, and the tools that it may call.

Equal content makes equal values, whatever its JSON looked like (a text or a list of parts): token
ids are made of these values alone, so that kept keys are found again at the next turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.parsing.tools import Tool


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model made. arguments: a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. role: system, user, assistant or tool; tool_call_id: of a tool's, which call
    it answers. reasoning: the thoughts before an assistant's text."""

    role: str
    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""

    def message(self) -> dict[str, Any]:
        """As chat templates read it."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {"name": call.name, "arguments": arguments_of(call)},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        return message


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a model is to continue with an assistant's turn."""

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()

    def messages(self) -> list[dict[str, Any]]:
        return [turn.message() for turn in self.turns]

    def declarations(self) -> list[dict[str, Any]]:
        return [tool.declaration() for tool in self.tools]


def arguments_of(call: ToolCall) -> Mapping[str, Any]:
    """A call's arguments; a text that is no JSON object (a model may write anything) is the one
    value of `input`."""
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"input": call.arguments}


def joined(texts: Sequence[str]) -> str:
    """The text of several parts of one message."""
    return "\n".join(text for text in texts if text)


def unread(kind: str) -> str:
    """What a model is told in place of a part of a tool's output that is no text. An agent sends
    such an output at every further turn: refused, it would end the conversation."""
    return f"[{kind:.80} left out: this model reads text alone]"
