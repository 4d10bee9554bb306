"""A conversation in one form for all APIs, with the tools that the model may call.

Equal content makes equal values, whether the JSON had a text or a list of parts. Token ids depend
on these values alone, so the next turn finds the KV cache of the turns before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.parsing.call_json import is_name
from lowtide.parsing.loose_json import loose_json
from lowtide.parsing.pieces import CallArguments, CallBegun, Piece
from lowtide.parsing.tools import Tool
from lowtide.serve.errors import Refusal

_MODES = ("auto", "none", "required")
"""Choices among tools that name none."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call made by a model. arguments: a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation.

    role: system, user, assistant or tool. tool_call_id: the call that a tool's message answers.
    reasoning: the thoughts before an assistant's text.
    """

    role: str
    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""

    def message(self) -> dict[str, Any]:
        """Return the message as chat templates read it."""
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
    """The turns that a model answers, and the tools it may call.

    If the last turn is an assistant's, the model continues that turn.
    """

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()

    @property
    def is_begun(self) -> bool:
        """True if the last turn is an assistant's, which the answer continues."""
        return bool(self.turns) and self.turns[-1].role == "assistant" and bool(self.turns[-1].text)

    def messages(self) -> list[dict[str, Any]]:
        return [turn.message() for turn in self.turns]


def callable_tools(tools: Iterable[Tool]) -> tuple[Tool, ...]:
    """Return the tools by name; a later declaration replaces an earlier one.

    Raises Refusal for a name that no call can have: such a call would be read as text.
    """
    named = {tool.name: tool for tool in tools}
    for name in named:
        if not is_name(name):
            raise Refusal(
                f"The tool {name[:80]!r:.80} cannot be called: a name has up to 256 letters, "
                "digits, and signs of _ . : / -. Rename it.",
                param="tools",
            )
    return tuple(named.values())


def checked_choice(
    choice: str, names_tool: bool, tools: Collection[str], left_out: Sequence[str] = ()
) -> str:
    """Return the choice among tools as `Ask` has it: auto, none, required or a function's name.

    left_out: tools that the provider would run itself. Raises Refusal if no tool fits the choice.
    """
    if names_tool and choice in _MODES and choice in tools:
        raise Refusal(
            f"A tool named {choice!r} cannot be chosen by its name, since tool_choice means "
            "something else by it: rename the tool.",
            param="tool_choice",
            code="unsupported",
        )
    is_mode = choice in _MODES and (choice != "required" or bool(tools))
    if choice in tools if names_tool else is_mode:
        return choice
    reason = f"; these are run by a provider and not here: {', '.join(left_out):.200}"
    raise Refusal(
        f"There is no tool for tool_choice {choice[:80]!r:.80}{reason if left_out else ''}.",
        param="tool_choice",
        code="unsupported",
    )


def arguments_of(call: ToolCall) -> Mapping[str, Any]:
    """Return a call's arguments as an object, which chat templates expect.

    Models may write anything: a text that is not a JSON object, even read leniently, becomes
    `{"input": text}`.
    """
    try:
        value = loose_json(call.arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    return {"input": call.arguments} if call.arguments.strip() else {}


def joined(texts: Sequence[str]) -> str:
    """Join the texts of a message's parts."""
    return "\n".join(text for text in texts if text)


def merged(turns: Iterable[Turn]) -> tuple[Turn, ...]:
    """Merge neighbouring turns of one role, except tools' outputs.

    APIs split one model turn into several items, but chat templates want roles to alternate.
    """
    runs: list[list[Turn]] = []
    for turn in turns:
        if runs and runs[-1][0].role == turn.role != "tool":
            runs[-1].append(turn)
        else:
            runs.append([turn])
    return tuple(run[0] if len(run) == 1 else _one_turn(run) for run in runs)


def _one_turn(turns: Sequence[Turn]) -> Turn:
    return Turn(
        turns[0].role,
        joined([turn.text for turn in turns]),
        joined([turn.reasoning for turn in turns]),
        tuple(call for turn in turns for call in turn.tool_calls),
    )


def calls_in(pieces: Iterable[Piece]) -> list[ToolCall]:
    """Collect the tool calls of an answer, in order."""
    begun: list[CallBegun] = []
    arguments: list[list[str]] = []
    for piece in pieces:
        if isinstance(piece, CallBegun):
            begun.append(piece)
            arguments.append([])
        elif isinstance(piece, CallArguments):
            arguments[piece.index].append(piece.text)
    pairs = zip(begun, arguments, strict=True)
    return [ToolCall(call.id, call.name, "".join(texts)) for call, texts in pairs]
