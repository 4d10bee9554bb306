"""Messages and tools of `/v1/messages`, read into a conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lowtide.parsing.tools import Tool
from lowtide.serve.conversation import Conversation, ToolCall, Turn, joined, unread
from lowtide.serve.errors import Refusal
from lowtide.serve.json_fields import name_at, object_at, objects_at, text_at
from lowtide.serve.turns import merged

_BILLING = "x-anthropic-billing-header:"

_ROLES = ("user", "assistant", "system")

_HOSTED_BLOCKS = (
    "bash_code_execution_tool_result",
    "code_execution_tool_result",
    "server_tool_use",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "web_fetch_tool_result",
    "web_search_tool_result",
)
"""Traces of tools that run at a provider."""


@dataclass(slots=True)
class MessageReader:
    """Reads a request's words. ignored: what was left out of them."""

    ignored: list[str] = field(default_factory=list)

    def conversation(self, system: object, messages: object, tools: object) -> Conversation:
        """Raises Refusal for what cannot be read, by its place."""
        turns = [*_system_turns(system)]
        for i, message in enumerate(objects_at(messages, "messages")):
            turns += self._turns(message, f"messages[{i}]")
        if not turns or turns[-1].role == "assistant":
            raise Refusal(
                "The conversation must end with a user message: an answer that is begun cannot be "
                "continued here.",
                param="messages",
            )
        return Conversation(merged(turns), tuple(self._tools(tools)))

    def _turns(self, message: Mapping[str, Any], where: str) -> Iterator[Turn]:
        role = message.get("role")
        if role not in _ROLES:
            raise Refusal(f"{where}.role {role!r:.80} is not known.", param=f"{where}.role")
        content, where = message.get("content"), f"{where}.content"
        if isinstance(content, str):
            yield Turn(role, content)
            return
        for i, block in enumerate(objects_at(content, where)):
            turn = self._turn(role, block, f"{where}[{i}]")
            if turn is not None:
                yield turn

    def _turn(self, role: str, block: Mapping[str, Any], where: str) -> Turn | None:
        """What one block says; None for one that says nothing here."""
        kind = text_at(block.get("type"), f"{where}.type")
        if kind == "text":
            return Turn(role, text_at(block.get("text"), f"{where}.text"))
        if kind == "tool_result" and role == "user":
            call_id = name_at(block.get("tool_use_id"), f"{where}.tool_use_id")
            text = _text(block.get("content") or "", f"{where}.content", self.ignored)
            return Turn("tool", text, tool_call_id=call_id)
        if kind == "thinking" and role == "assistant":
            return Turn(role, "", text_at(block.get("thinking"), f"{where}.thinking"))
        if kind == "tool_use" and role == "assistant":
            return Turn(role, "", tool_calls=(_call(block, where),))
        if kind == "redacted_thinking" or kind in _HOSTED_BLOCKS:
            self.ignored.append(f"{where}.{kind}")
            return None
        raise _unsupported(kind, where)

    def _tools(self, declared: object) -> list[Tool]:
        """Those that a client runs itself; one that comes again replaces the earlier."""
        tools: dict[str, Tool] = {}
        for i, tool in enumerate(objects_at(declared or [], "tools")):
            where = f"tools[{i}]"
            kind = tool.get("type") or "custom"
            if kind != "custom":
                self.ignored.append(f"tools.{kind}")
                continue
            name = name_at(tool.get("name"), f"{where}.name")
            description = text_at(tool.get("description") or "", f"{where}.description")
            schema = object_at(tool.get("input_schema") or {}, f"{where}.input_schema")
            tools[name] = Tool(name, description, schema, strict=tool.get("strict") is True)
        return list(tools.values())


def tool_choice(choice: Mapping[str, Any] | None, tools: tuple[Tool, ...]) -> str:
    """As `Ask` has it. Raises Refusal for a choice that no tool is left for."""
    kind = "auto" if choice is None else choice.get("type")
    if kind in ("auto", "none"):
        return str(kind)
    names = {tool.name for tool in tools}
    if kind == "any":
        if not names:
            raise Refusal("tool_choice needs a tool, and none can be called.", param="tool_choice")
        return "required"
    if kind != "tool" or choice is None:
        raise Refusal(f"tool_choice.type {kind!r:.80} is not known.", param="tool_choice.type")
    name = name_at(choice.get("name"), "tool_choice.name")
    if name not in names:
        raise Refusal(
            f"tool_choice names {name!r}, which is no tool that can be called.", param="tool_choice"
        )
    return name


def _system_turns(system: object) -> Iterator[Turn]:
    """The system's words, without the line that a client bills by, which is another at every
    request: no kept key would ever be found again behind it."""
    text = "" if system is None else _text(system, "system")
    if _BILLING in text:
        lines = [line for line in text.split("\n") if not line.startswith(_BILLING)]
        text = "\n".join(lines).strip("\n")
    if text:
        yield Turn("system", text)


def _call(block: Mapping[str, Any], where: str) -> ToolCall:
    call_id = name_at(block.get("id"), f"{where}.id")
    arguments = object_at(block.get("input"), f"{where}.input")
    name = name_at(block.get("name"), f"{where}.name")
    return ToolCall(call_id, name, json.dumps(arguments, ensure_ascii=False))


def _text(value: object, where: str, ignored: list[str] | None = None) -> str:
    """A text, or the blocks of one. ignored: gets the names of other blocks, of which the model is
    told; without it they are refused."""
    if isinstance(value, str):
        return value
    texts = []
    for i, block in enumerate(objects_at(value, where)):
        kind = text_at(block.get("type"), f"{where}[{i}].type")
        if kind == "text":
            texts.append(text_at(block.get("text"), f"{where}[{i}].text"))
        elif ignored is None:
            raise _unsupported(kind, f"{where}[{i}]")
        else:
            ignored.append(f"{where}[{i}].{kind}")
            texts.append(unread(kind))
    return joined(texts)


def _unsupported(kind: str, where: str) -> Refusal:
    return Refusal(
        f"{where}: blocks of type {kind!r:.80} are not supported; models read text here.",
        param=where,
        code="unsupported",
    )
