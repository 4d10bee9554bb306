"""`/v1/messages`: Anthropic's API, which Claude Code uses.

`_asked` maps a request's fields to an `Ask`. `MessageReply.frames` maps each kind of piece of an
answer to the API's events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Response
from pydantic import AliasChoices, Field

from lowtide.files.long_json import write_json
from lowtide.parsing.call_json import json_text, parsed
from lowtide.parsing.pieces import (
    CallArguments,
    CallBegun,
    Done,
    Piece,
    Prefilled,
    Reasoning,
    Text,
)
from lowtide.parsing.tools import Tool
from lowtide.serve.agent_api import AgentBody, effort_options, headers_of
from lowtide.serve.conversation import (
    Conversation,
    ToolCall,
    Turn,
    arguments_of,
    callable_tools,
    checked_choice,
    merged,
)
from lowtide.serve.errors import Refusal, body_of
from lowtide.serve.grammar_text import Constraint
from lowtide.serve.json_body import JsonRoute
from lowtide.serve.json_fields import (
    MAX_PARTS,
    PlacedObject,
    left_out,
    object_at,
    objects_at,
    unsupported,
    words_of,
)
from lowtide.serve.openai_fields import MAX_MESSAGES, MAX_TOOLS, Stop, new_id
from lowtide.serve.reply import JsonObject, Reply, answered, json_response
from lowtide.serve.service import Ask, Service

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
"""Blocks left by tools that ran at a provider."""

_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Type of a block -> type of its deltas, and the field that holds their text."""

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def router_of(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.head("/api/hello")
    async def hello() -> Response:
        return Response()

    @router.post("/v1/messages")
    def create_message(body: MessagesBody) -> Response:
        ask, headers = _asked(service, body)
        reply = MessageReply(service.model_name)
        return answered(service, [ask], reply, body.stream, headers)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: MessagesBody) -> Response:
        ask, headers = await asyncio.to_thread(_asked, service, body)
        return json_response({"input_tokens": await service.count(ask)}, headers)

    return router


# --- The request -----------------------------------------------------------------------------


class MessagesBody(AgentBody):
    """A request; `AgentBody` has the fields shared with other APIs."""

    messages: list[Any] = Field(max_length=MAX_MESSAGES)
    system: str | list[Any] = ""
    tools: list[Any] = Field([], max_length=MAX_TOOLS)
    tool_choice: dict[str, Any] = {"type": "auto"}
    stop: Stop | None = Field(None, validation_alias=AliasChoices("stop_sequences", "stop"))
    thinking: dict[str, Any] = {}
    output_config: dict[str, Any] = {}
    output_format: dict[str, Any] | None = None


def _asked(service: Service, body: MessagesBody) -> tuple[Ask, dict[str, str]]:
    """Return the Ask, and headers naming ignored fields. Raise Refusal or UsageError."""
    reader, effort = _MessageReader(), effort_options(body.output_config.get("effort"))
    conversation = reader.conversation(body.system, body.messages, body.tools)
    ignored = [
        *body.ignored(),
        *reader.ignored,
        *body.unused_parts("thinking", ("type",)),
        *body.unused_parts("output_config", ("effort", "format") if effort else ("format",)),
    ]
    # Without the field a model does not think in this API.
    is_thinking = body.thinking.get("type", "disabled") != "disabled"
    ask = Ask(
        conversation=conversation,
        params=body.params(body.max_tokens),
        template_options={"enable_thinking": is_thinking, **effort},
        tool_choice=_tool_choice(body.tool_choice, conversation.tools),
        constraint=_constraint(service, body, ignored),
        wants_progress=True,
        cut_to_room=True,
        parallel_calls=not body.tool_choice.get("disable_parallel_tool_use"),
    )
    return ask, headers_of(service, body.model, ignored)


def _tool_choice(choice: Mapping[str, Any], tools: tuple[Tool, ...]) -> str:
    """Return the tool choice as `Ask` has it. Raise Refusal if no tool remains for it."""
    given = PlacedObject(choice, "tool_choice")
    kind = given.one_of("type", ("auto", "none", "any", "tool"))
    names = {tool.name for tool in tools}
    if kind == "tool":
        return checked_choice(given.name("name"), True, names)
    return checked_choice("required" if kind == "any" else kind, False, names)


def _constraint(service: Service, body: MessagesBody, ignored: list[str]) -> Constraint | None:
    """Return the constraint on the answer's text.

    A diffusion model cannot be constrained. The field is then ignored: agents send it in passing,
    and a refusal would end them.
    """
    format = body.output_config.get("format") or body.output_format
    if format is None:
        return None
    if not service.llm.config.decoding.writes_in_order:
        ignored.append("output_config.format")
        return None
    return Constraint.json_schema(object_at(format, "output_config.format").object("schema").fields)


@dataclass(slots=True)
class _MessageReader:
    """Reads a request's messages. ignored: paths of parts that were left out."""

    ignored: list[str] = field(default_factory=list)

    def conversation(self, system: object, messages: object, tools: object) -> Conversation:
        """Return the conversation. Raise Refusal, with the path, for anything unreadable."""
        turns = [*_system_turns(system)]
        for message in objects_at(messages, "messages", MAX_MESSAGES):
            turns += self._turns(message)
        if not turns:
            raise Refusal("The conversation must have a user message.", param="messages")
        return Conversation(merged(turns), callable_tools(self._tools(tools)))

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
        """Return one block as a turn, or None if it has no text."""
        match block.text("type"), role:
            case "text", _:
                return Turn(role, block.text("text"))
            case "tool_result", "user":
                call_id = block.name("tool_use_id")
                text = _text(block.get("content", ""), block.at("content"), self.ignored)
                return Turn("tool", text, tool_call_id=call_id)
            case "thinking", "assistant":
                return Turn(role, "", block.text("thinking"))
            case "tool_use", "assistant":
                arguments = write_json(block.object("input").fields, ensure_ascii=False)
                call = ToolCall(block.name("id"), block.name("name"), arguments)
                return Turn(role, "", tool_calls=(call,))
            case "document", "user":
                return Turn(role, self._document(block))
            case kind, _ if kind == "redacted_thinking" or kind in _HOSTED_BLOCKS:
                self.ignored.append(block.at(kind))
                return None
            case kind, _:
                raise unsupported(block.where, f"blocks of type {kind[:80]!r:.80}")

    def _document(self, block: PlacedObject) -> str:
        """Return a document's text, or a note that it was left out.

        It is not refused: a client that opened the file itself sends it again at every turn.
        """
        source = block.object("source", {})
        if source.get("type") == "text":
            return source.text("data")
        self.ignored.append(block.at("document"))
        return left_out("document")

    def _tools(self, declared: object) -> Iterator[Tool]:
        """Yield the tools that the client runs."""
        for tool in objects_at(declared, "tools", MAX_TOOLS):
            kind = tool.get("type", "custom")
            if kind != "custom":
                self.ignored.append(f"tools.{kind}")
                continue
            name, description = tool.name("name"), tool.text("description", "")
            schema = tool.object("input_schema", {}).fields
            yield Tool(name, description, schema, strict=tool.get("strict") is True)


def _system_turns(system: object) -> Iterator[Turn]:
    """Yield the system prompt without the client's billing line.

    That line differs in every request, so no cached prefix after it would ever be reused.
    """
    text = _text(system, "system")
    if _BILLING in text:
        lines = [line for line in text.split("\n") if not line.startswith(_BILLING)]
        text = "\n".join(lines).strip("\n")
    if text:
        yield Turn("system", text)


def _text(value: object, where: str, ignored: list[str] | None = None) -> str:
    return words_of(value, where, "blocks", {"text": "text"}, ignored)


# --- The answer ------------------------------------------------------------------------------


class MessageReply(Reply):
    """Builds one message and its events.

    A call's arguments are sent only once complete: clients fail on invalid JSON, and take a
    beginning for the whole.
    """

    def __init__(self, model: str) -> None:
        self._message: JsonObject = {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": None,
        }
        self._blocks: list[JsonObject] = []
        self._texts: list[str] = []  # of the last block
        self._is_open = False
        self._prefilled = Prefilled(0, 0)

    def frames(self, piece: Piece, index: int = 0) -> Iterator[JsonObject]:
        match piece:
            case Prefilled():
                self._prefilled = piece
                if not self._message["usage"]:
                    self._message["usage"] = _usage(piece.num_total, 0, 0)
                    yield {"type": "message_start", "message": dict(self._message)}
            case Reasoning():
                yield from self._in_block("thinking", piece, thinking="", signature="")
            case Text():
                yield from self._in_block("text", piece, text="")
            case CallBegun(_, call_id, name):
                call = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                yield from self._open(call)
            case CallArguments(_, text):
                self._texts.append(text)
            case Done():
                yield from self._end(piece)

    def ping(self) -> JsonObject:
        done, total = self._prefilled.num_done, self._prefilled.num_total
        return {"type": "ping", "lowtide": {"prompt_tokens_done": done, "prompt_tokens": total}}

    def failed(self, refusal: Refusal) -> JsonObject:
        return body_of(refusal, "/v1/messages")

    def whole(self) -> JsonObject:
        return self._message | {"content": self._blocks}

    def _in_block(self, kind: str, more: Text | Reasoning, **fields: str) -> Iterator[JsonObject]:
        """Add to the open block of this kind, or open a new one."""
        if not self._is_open or self._blocks[-1]["type"] != kind or more.is_new_part:
            yield from self._open({"type": kind, **fields})
        self._texts.append(more.text)
        yield self._delta(more.text)

    def _open(self, block: JsonObject) -> Iterator[JsonObject]:
        yield from self._close()
        self._blocks.append(block)
        self._texts, self._is_open = [], True
        yield self._of_block("content_block_start", content_block=dict(block))

    def _delta(self, text: str) -> JsonObject:
        kind, field = _DELTAS[self._blocks[-1]["type"]]
        return self._of_block("content_block_delta", delta={"type": kind, field: text})

    def _close(self, is_cut: bool = False) -> Iterator[JsonObject]:
        """End the open block.

        is_cut: the answer reached its maximum length; an unfinished call then has no arguments.
        """
        if not self._is_open:
            return
        block, text = self._blocks[-1], "".join(self._texts)
        if block["type"] == "tool_use":
            is_object = isinstance(parsed(text), Mapping)
            if text and (is_object or not is_cut):
                block["input"] = arguments_of(ToolCall("", "", text))
                yield self._delta(text if is_object else json_text(block["input"]))
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            signature = {"type": "signature_delta", "signature": ""}
            yield self._of_block("content_block_delta", delta=signature)
        yield self._of_block("content_block_stop")
        self._is_open = False

    def _end(self, done: Done) -> Iterator[JsonObject]:
        yield from self._close(is_cut=done.reason == "length")
        reason = "stop_sequence" if done.stop_string is not None else _REASONS[done.reason]
        stop = {"stop_reason": reason, "stop_sequence": done.stop_string}
        self._message |= stop
        usage = self._message["usage"] = _usage(done.num_prompt, done.num_resumed, done.num_new)
        yield {"type": "message_delta", "delta": stop, "usage": usage}
        yield {"type": "message_stop"}

    def _of_block(self, kind: str, **fields: JsonObject) -> JsonObject:
        return {"type": kind, "index": len(self._blocks) - 1, **fields}


def _usage(num_prompt: int, num_resumed: int, num_new: int) -> JsonObject:
    """Count tokens. Anthropic's `input_tokens` exclude those read from the cache."""
    return {
        "input_tokens": num_prompt - num_resumed,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_resumed,
        "output_tokens": num_new,
    }
