"""`/v1/responses`: OpenAI's newer API, which Codex speaks. Stateless: nothing is stored between
requests, and the whole conversation comes with each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from lowtide.params import SamplingParams, with_published
from lowtide.serve.agent_api import AgentBody, effort_options, headers_of
from lowtide.serve.conversation import Conversation, Turn, checked_choice, merged
from lowtide.serve.errors import Refusal
from lowtide.serve.grammar_text import Constraint
from lowtide.serve.json_body import JsonRoute
from lowtide.serve.json_fields import PlacedObject
from lowtide.serve.openai_fields import MAX_INTEGER, MAX_MESSAGES, MAX_TOOLS, new_id
from lowtide.serve.reply import JsonObject, answered
from lowtide.serve.responses_events import ResponseEvents
from lowtide.serve.responses_items import ItemReader, ToolSet, called_name
from lowtide.serve.service import Ask, Service

MAX_INCLUDED = 64

_SEALED_THOUGHTS = "reasoning.encrypted_content"

_STORED = ("previous_response_id", "conversation", "background", "prompt")
"""Fields that name what only a server that stores things could know."""


class ResponsesBody(AgentBody):
    """A request. input: a text or items; `responses_items` reads them."""

    input: str | Annotated[list[Any], Field(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    tools: list[Any] = Field([], max_length=MAX_TOOLS)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_INTEGER)
    text: dict[str, Any] = {}
    reasoning: dict[str, Any] = {}
    include: list[str] = Field([], max_length=MAX_INCLUDED)
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None


def router_of(service: Service) -> APIRouter:
    """The routes of this API."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/responses")
    def create_response(body: ResponsesBody) -> Response:
        ask, reply, headers = _read(service, body)
        return answered(service, [ask], reply, body.stream, headers)

    return router


def _read(service: Service, body: ResponsesBody) -> tuple[Ask, ResponseEvents, dict[str, str]]:
    """What is asked, how it is answered, and what the answer's headers disclose. Raises Refusal or
    UsageError for what cannot be answered.
    """
    _check_stateless(body)
    tools = ToolSet()
    tools.add(body.tools, "tools")
    reader = ItemReader(tools)
    turns = reader.turns(body.input)
    if not turns:
        raise Refusal("input has no message.", param="input")
    instructions = [Turn("system", body.instructions)] if body.instructions else []
    choice = _tool_choice(body.tool_choice, tools)
    params = body.params(body.max_output_tokens or body.max_tokens)
    ask = Ask(
        conversation=Conversation(merged([*instructions, *turns]), tuple(tools.tools.values())),
        params=params,
        template_options=effort_options(body.reasoning.get("effort")),
        tool_choice=choice,
        constraint=_constraint(PlacedObject(body.text, "text")),
        wants_progress=True,
        cut_to_room=True,
        parallel_calls=body.parallel_tool_calls,
    )
    seals = _SEALED_THOUGHTS in body.include
    writer = ResponseEvents(_response(service, body, params), tools.forms, seals)
    ignored = [*_ignored(body), *tools.ignored, *reader.ignored]
    return ask, writer, headers_of(service, body.model, ignored)


def _check_stateless(body: ResponsesBody) -> None:
    for name in _STORED:
        if getattr(body, name):
            raise Refusal(
                f"{name} is not supported: nothing is stored between requests here; send the whole "
                "conversation in input.",
                param=name,
                code="unsupported",
            )


def _tool_choice(choice: str | dict[str, Any], tools: ToolSet) -> str:
    """As `Ask` has it; of tools that only some are allowed of, the others go. Raises Refusal."""
    if isinstance(choice, dict):
        given = PlacedObject(choice, "tool_choice")
        if given.get("type") == "allowed_tools":
            names = set(map(_chosen, given.objects("tools", MAX_TOOLS)))
            tools.tools = {name: tool for name, tool in tools.tools.items() if name in names}
            choice = given.text("mode") if "mode" in choice else "auto"
        else:
            return checked_choice(_chosen(given), True, tools.tools, tools.ignored)
    return checked_choice(choice, False, tools.tools, tools.ignored)


def _chosen(choice: PlacedObject) -> str:
    """The flat name of a tool that a choice names; of a provider's own tool its type."""
    is_ours = choice.get("type") in ("function", "custom")
    return called_name(choice) if is_ours else choice.text("type")


def _constraint(text: PlacedObject) -> Constraint | None:
    """What the answer's text must be."""
    format = text.object("format", {"type": "text"})
    kind = format.one_of("type", ("text", "json_object", "json_schema"))
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint.json_object()
    return Constraint.json_schema(format.object("schema").fields)


def _ignored(body: ResponsesBody) -> Iterator[str]:
    """Fields, and parts of fields, that are taken and not used."""
    yield from body.ignored(["metadata", *([] if body.store else ["store"])])
    yield from body.unused_parts("text", ("format",))
    effort = effort_options(body.reasoning.get("effort"))
    yield from body.unused_parts("reasoning", ("effort",) if effort else ())
    yield from (f"include.{name}" for name in body.include if name != _SEALED_THOUGHTS)


def _response(service: Service, body: ResponsesBody, params: SamplingParams) -> JsonObject:
    """The response before its answer: what was asked, as it is understood."""
    drawn = with_published(params, service.llm.config.sampling)
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": params.max_tokens,
        "max_tool_calls": None,
        "model": service.model_name,
        "parallel_tool_calls": body.parallel_tool_calls,
        "presence_penalty": drawn.presence_penalty or 0.0,
        "frequency_penalty": drawn.frequency_penalty or 0.0,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": body.reasoning.get("effort"), "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": False,
        "temperature": drawn.temperature,
        "text": {"format": {"type": "text"}} | body.text,
        "tool_choice": body.tool_choice,
        "tools": [_tool_object(tool) for tool in body.tools],
        "top_logprobs": 0,
        "top_p": drawn.top_p or 1.0,
        "truncation": "disabled",
        "usage": None,
        "user": None,
        "metadata": body.metadata or {},
    }


def _tool_object(tool: JsonObject) -> JsonObject:
    """A tool as responses have it: a function with all its fields."""
    unset = {"description": None, "parameters": None, "strict": None}
    return unset | tool if tool["type"] == "function" else tool
