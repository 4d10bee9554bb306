"""A conversation as every API's requests are read into it, and the tools that it may call.

Equal content makes equal values, whatever its JSON looked like (a text or a list of parts): token
ids are made of these values alone, so that kept keys are found again at the next turn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.parsing.loose_json import loose_json
from lowtide.parsing.pieces import CallArguments, CallBegun, Piece
from lowtide.parsing.tools import Tool
from lowtide.serve.errors import Refusal


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model made. arguments: a JSON object as text."""

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
    """What a model is to continue with an assistant's turn, or in the one that ends it."""

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()

    @property
    def is_begun(self) -> bool:
        """Whether an answer is begun that is to be continued."""
        return bool(self.turns) and self.turns[-1].role == "assistant" and bool(self.turns[-1].text)

    def messages(self) -> list[dict[str, Any]]:
        return [turn.message() for turn in self.turns]


def checked_choice(
    choice: str, is_name: bool, tools: Collection[str], left_out: Sequence[str] = ()
) -> str:
    """A choice among tools, as `Ask` has it: auto, none, required or, if `is_name`, a function's.

    left_out: what a provider would run itself. Raises Refusal where no tool is there for it.
    """
    is_mode = choice in ("auto", "none") or (choice == "required" and bool(tools))
    if choice in tools if is_name else is_mode:
        return choice
    reason = f"; these are run by a provider and not here: {', '.join(left_out):.200}"
    raise Refusal(
        f"There is no tool for tool_choice {choice[:80]!r:.80}{reason if left_out else ''}.",
        param="tool_choice",
        code="unsupported",
    )


def arguments_of(call: ToolCall) -> Mapping[str, Any]:
    """Return a call's arguments, none where nothing is written.

    A text that is no JSON object, not even with Python's words (a model may write anything), is the
    one value of `input`.
    """
    try:
        value = loose_json(call.arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    return {"input": call.arguments} if call.arguments.strip() else {}


def joined(texts: Sequence[str]) -> str:
    """The text of several parts of one message."""
    return "\n".join(text for text in texts if text)


def merged(turns: Iterable[Turn]) -> tuple[Turn, ...]:
    """Merge neighbouring turns of one role; a tool's outputs stay apart.

    APIs divide what a model wrote as one turn into items or messages, and templates want roles in
    turn.
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
    """The calls of an answer, in order."""
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
