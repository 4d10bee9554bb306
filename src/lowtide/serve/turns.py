"""Turns of one role that stand side by side are one: APIs divide what a model wrote as one turn
into items or messages, and templates want roles in turn."""

from __future__ import annotations

from collections.abc import Iterable

from lowtide.serve.conversation import Turn, joined


def merged(turns: Iterable[Turn]) -> tuple[Turn, ...]:
    """The same words in as few turns as there can be; a tool's outputs stay apart."""
    found: list[Turn] = []
    for turn in turns:
        if found and found[-1].role == turn.role != "tool":
            found[-1] = _together(found[-1], turn)
        else:
            found.append(turn)
    return tuple(found)


def _together(first: Turn, second: Turn) -> Turn:
    return Turn(
        first.role,
        joined([first.text, second.text]),
        joined([first.reasoning, second.reasoning]),
        first.tool_calls + second.tool_calls,
    )
