"""`/v1/messages`: Anthropic's API, which Claude Code speaks."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Response
from pydantic import AliasChoices, Field

from lowtide.serve.agent_api import AgentBody, effort_options, headers_of
from lowtide.serve.anthropic_blocks import MessageReader, tool_choice
from lowtide.serve.anthropic_events import MessageEvents
from lowtide.serve.grammar_text import Constraint
from lowtide.serve.json_body import JsonRoute
from lowtide.serve.json_fields import object_at
from lowtide.serve.openai_fields import MAX_MESSAGES, MAX_TOOLS, Stop
from lowtide.serve.reply import answered, json_response
from lowtide.serve.service import Ask, Service


class MessagesBody(AgentBody):
    """A request. messages, system and tools: `anthropic_blocks` reads them."""

    messages: list[Any] = Field(max_length=MAX_MESSAGES)
    system: str | list[Any] = ""
    tools: list[Any] = Field([], max_length=MAX_TOOLS)
    tool_choice: dict[str, Any] = {"type": "auto"}
    stop: Stop | None = Field(None, validation_alias=AliasChoices("stop_sequences", "stop"))
    thinking: dict[str, Any] = {}
    output_config: dict[str, Any] = {}
    output_format: dict[str, Any] | None = None


def router_of(service: Service) -> APIRouter:
    """The routes of this API."""
    router = APIRouter(route_class=JsonRoute)

    @router.head("/api/hello")
    async def hello() -> Response:
        return Response()

    @router.post("/v1/messages")
    def create_message(body: MessagesBody) -> Response:
        ask, headers = _read(service, body)
        reply = MessageEvents(service.model_name)
        return answered(service, [ask], reply, body.stream, headers)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: MessagesBody) -> Response:
        ask, headers = await asyncio.to_thread(_read, service, body)
        return json_response({"input_tokens": await service.count(ask)}, headers)

    return router


def _read(service: Service, body: MessagesBody) -> tuple[Ask, dict[str, str]]:
    """What is asked, and what the answer's headers disclose. Raises Refusal or UsageError."""
    reader, effort = MessageReader(), effort_options(body.output_config.get("effort"))
    conversation = reader.conversation(body.system, body.messages, body.tools)
    ignored = [
        *body.ignored(),
        *reader.ignored,
        *body.unused_parts("thinking", ("type",)),
        *body.unused_parts("output_config", ("effort", "format") if effort else ("format",)),
    ]
    # Not at all where nothing is said, as this API has it.
    is_thinking = body.thinking.get("type", "disabled") != "disabled"
    ask = Ask(
        conversation=conversation,
        params=body.params(body.max_tokens),
        template_options={"enable_thinking": is_thinking, **effort},
        tool_choice=tool_choice(body.tool_choice, conversation.tools),
        constraint=_constraint(service, body, ignored),
        wants_progress=True,
        cut_to_room=True,
        parallel_calls=not body.tool_choice.get("disable_parallel_tool_use"),
    )
    return ask, headers_of(service, body.model, ignored)


def _constraint(service: Service, body: MessagesBody, ignored: list[str]) -> Constraint | None:
    """What the answer's text must be; nothing of a diffusion model, which no grammar guides: an
    agent asks for it in passing, and is not to die of it.
    """
    format = body.output_config.get("format") or body.output_format
    if format is None:
        return None
    if not service.llm.config.decoding.writes_in_order:
        ignored.append("output_config.format")
        return None
    return Constraint.json_schema(object_at(format, "output_config.format").object("schema").fields)
