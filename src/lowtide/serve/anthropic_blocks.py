"""Messages and tools of `/v1/messages`, read into a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lowtide.files.long_json import write_json
from lowtide.parsing.tools import Tool
from lowtide.serve.conversation import Conversation, ToolCall, Turn, checked_choice, merged
from lowtide.serve.errors import Refusal
from lowtide.serve.json_fields import (
    MAX_PARTS,
    PlacedObject,
    left_out,
    objects_at,
    unsupported,
    words_of,
)
from lowtide.serve.openai_fields import MAX_MESSAGES, MAX_TOOLS

_BILLING = "x-anthropic-billing-header:"

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
        for message in objects_at(messages, "messages", MAX_MESSAGES):
            turns += self._turns(message)
        if not turns:
            raise Refusal("The conversation must have a user message.", param="messages")
        return Conversation(merged(turns), tuple(self._tools(tools)))

    def _turns(self, message: PlacedObject) -> Iterator[Turn]:
        role = message.one_of("role", ("user", "assistant", "system"))
        content = message.get("content")
        if isinstance(content, str):
            yield Turn(role, content)
            return
        blocks = message.objects("content", MAX_PARTS)
        if not blocks and role == "user":
            place = message.at("content")
            raise Refusal(f"{place} has no block: a user message says something.", param=place)
        for block in blocks:
            turn = self._turn(role, block)
            if turn is not None:
                yield turn

    def _turn(self, role: str, block: PlacedObject) -> Turn | None:
        """What one block says; None for one that says nothing here."""
        kind = block.text("type")
        if kind == "text":
            return Turn(role, block.text("text"))
        if kind == "tool_result" and role == "user":
            call_id = block.name("tool_use_id")
            text = _text(block.get("content", ""), block.at("content"), self.ignored)
            return Turn("tool", text, tool_call_id=call_id)
        if kind == "thinking" and role == "assistant":
            return Turn(role, "", block.text("thinking"))
        if kind == "tool_use" and role == "assistant":
            arguments = write_json(block.object("input").fields, ensure_ascii=False)
            call = ToolCall(block.name("id"), block.name("name"), arguments)
            return Turn(role, "", tool_calls=(call,))
        if kind == "document" and role == "user":
            return Turn(role, self._document(block))
        if kind == "redacted_thinking" or kind in _HOSTED_BLOCKS:
            self.ignored.append(block.at(kind))
            return None
        raise unsupported(block.where, f"blocks of type {kind[:80]!r:.80}")

    def _document(self, block: PlacedObject) -> str:
        """Its words, or that it was left out: a client that opened a file by itself sends it at
        every further turn.
        """
        source = block.object("source", {})
        if source.get("type") == "text":
            return source.text("data")
        self.ignored.append(block.at("document"))
        return left_out("document")

    def _tools(self, declared: object) -> list[Tool]:
        """Those that a client runs itself; one that comes again replaces the earlier."""
        tools: dict[str, Tool] = {}
        for tool in objects_at(declared, "tools", MAX_TOOLS):
            kind = tool.get("type", "custom")
            if kind != "custom":
                self.ignored.append(f"tools.{kind}")
                continue
            name, description = tool.name("name"), tool.text("description", "")
            schema = tool.object("input_schema", {}).fields
            tools[name] = Tool(name, description, schema, strict=tool.get("strict") is True)
        return list(tools.values())


def tool_choice(choice: Mapping[str, Any], tools: tuple[Tool, ...]) -> str:
    """As `Ask` has it. Raises Refusal for a choice that no tool is left for."""
    given = PlacedObject(choice, "tool_choice")
    kind = given.one_of("type", ("auto", "none", "any", "tool"))
    names = {tool.name for tool in tools}
    if kind == "tool":
        return checked_choice(given.name("name"), True, names)
    return checked_choice("required" if kind == "any" else kind, False, names)


def _system_turns(system: object) -> Iterator[Turn]:
    """The system's words, without the line that a client bills by, which is another at every
    request: no kept key would ever be found again behind it.
    """
    text = _text(system, "system")
    if _BILLING in text:
        lines = [line for line in text.split("\n") if not line.startswith(_BILLING)]
        text = "\n".join(lines).strip("\n")
    if text:
        yield Turn("system", text)


def _text(value: object, where: str, ignored: list[str] | None = None) -> str:
    return words_of(value, where, "blocks", {"text": "text"}, ignored)
