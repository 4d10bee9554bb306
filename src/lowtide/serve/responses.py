"""`/v1/responses`: OpenAI's newer API, which Codex uses.

Stateless: nothing is stored between requests, and each request brings the whole conversation.
`_asked` maps a request's fields to an `Ask`. `ResponseReply.frames` maps each kind of piece of an
answer to events.

A tool has two names: the flat one that the model uses, and the client's, which may have a namespace
or be a custom tool with a text as input.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Response
from pydantic import Field

from lowtide.params import SamplingParams, with_published
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
    callable_tools,
    checked_choice,
    merged,
)
from lowtide.serve.custom_tools import CustomInput, custom_arguments, custom_tool
from lowtide.serve.errors import Refusal
from lowtide.serve.grammar_text import Constraint
from lowtide.serve.json_body import JsonRoute
from lowtide.serve.json_fields import PlacedObject, objects_at, words_of
from lowtide.serve.openai_fields import MAX_INTEGER, MAX_MESSAGES, MAX_TOOLS, new_id
from lowtide.serve.reply import JsonObject, Reply, answered
from lowtide.serve.service import Ask, Service

MAX_INCLUDED = 64

_SEALED_THOUGHTS = "reasoning.encrypted_content"

_STORED = ("previous_response_id", "conversation", "background", "prompt")
"""Fields that only a server with stored responses can answer."""

_SEALED = "lowtide:"

_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_TEXT_FIELDS = {**dict.fromkeys(_TEXT_PARTS, "text"), "refusal": "refusal"}

_HOSTED_ITEMS = {
    "code_interpreter_call",
    "computer_call",
    "file_search_call",
    "image_generation_call",
    "mcp_list_tools",
    "tool_search_call",
    "tool_search_output",
    "web_search_call",
}
"""Items left by tools that ran at a provider; the model has their answer and does not need them."""

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


def router_of(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/responses")
    def create_response(body: ResponsesBody) -> Response:
        ask, reply, headers = _asked(service, body)
        return answered(service, [ask], reply, body.stream, headers)

    return router


# --- The request -----------------------------------------------------------------------------


class ResponsesBody(AgentBody):
    """A request; `AgentBody` has the fields shared with other APIs."""

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


def _asked(service: Service, body: ResponsesBody) -> tuple[Ask, ResponseReply, dict[str, str]]:
    """Return the Ask, its reply, and headers naming ignored fields.

    Raises Refusal or UsageError.
    """
    _check_stateless(body)
    tools = ToolSet()
    tools.add(body.tools, "tools")
    reader = _ItemReader(tools)
    turns = reader.turns(body.input)
    if not turns:
        raise Refusal("input has no message.", param="input")
    instructions = [Turn("system", body.instructions)] if body.instructions else []
    choice = _tool_choice(body.tool_choice, tools)
    called = callable_tools(tools.tools.values())
    params = body.params(body.max_output_tokens or body.max_tokens)
    ask = Ask(
        conversation=Conversation(merged([*instructions, *turns]), called),
        params=params,
        template_options=effort_options(body.reasoning.get("effort")),
        tool_choice=choice,
        constraint=_constraint(PlacedObject(body.text, "text")),
        wants_progress=True,
        cut_to_room=True,
        parallel_calls=body.parallel_tool_calls,
    )
    seals = _SEALED_THOUGHTS in body.include
    reply = ResponseReply(_response(service, body, params), tools.forms, seals)
    ignored = [*_ignored(body), *tools.ignored, *reader.ignored]
    return ask, reply, headers_of(service, body.model, ignored)


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
    """Return the tool choice as `Ask` has it; drop tools that are not allowed. Raise Refusal."""
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
    """Return the flat name of a chosen tool, or the type of a provider's own tool."""
    is_ours = choice.get("type") in ("function", "custom")
    return called_name(choice) if is_ours else choice.text("type")


def _constraint(text: PlacedObject) -> Constraint | None:
    """Return the constraint on the answer's text."""
    format = text.object("format", {"type": "text"})
    kind = format.one_of("type", ("text", "json_object", "json_schema"))
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint.json_object()
    return Constraint.json_schema(format.object("schema").fields)


def _ignored(body: ResponsesBody) -> Iterator[str]:
    """Yield the fields, and parts of fields, that are accepted and ignored."""
    yield from body.ignored(["metadata", *([] if body.store else ["store"])])
    yield from body.unused_parts("text", ("format",))
    effort = effort_options(body.reasoning.get("effort"))
    yield from body.unused_parts("reasoning", ("effort",) if effort else ())
    yield from (f"include.{name}" for name in body.include if name != _SEALED_THOUGHTS)


@dataclass(frozen=True, slots=True)
class ToolForm:
    """A tool's name for the client. is_custom: it takes a text instead of JSON arguments."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(slots=True)
class ToolSet:
    """A request's tools by flat name, as the model sees them, and their forms for the client.

    ignored: types of tools that only a provider can run.
    """

    tools: dict[str, Tool] = field(default_factory=dict)
    forms: dict[str, ToolForm] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)

    def add(self, declared: object, where: str, namespace: str | None = None) -> None:
        """Add a list of tools in the API's form; a later declaration replaces an earlier one."""
        for tool in objects_at(declared, where, MAX_TOOLS):
            kind = tool.text("type")
            if kind == "namespace" and namespace is None:
                self.add(tool.get("tools"), tool.at("tools"), tool.name("name"))
            elif kind in ("function", "custom"):
                self._add_one(tool, namespace)
            else:
                self.ignored.append(f"tools.{kind}")

    def _add_one(self, tool: PlacedObject, namespace: str | None) -> None:
        form = ToolForm(tool.name("name"), namespace, tool.fields["type"] == "custom")
        name, description = flat_name(form.name, namespace), tool.text("description", "")
        if form.is_custom:
            form_of = tool.object("format", {})
            is_grammar = form_of.get("type") == "grammar"
            asked = (form_of.text("syntax"), form_of.text("definition")) if is_grammar else None
            shown = custom_tool(name, description, asked)
        else:
            parameters = tool.object("parameters", {}).fields
            shown = Tool(name, description, parameters, tool.get("strict") is True)
        self.tools[name], self.forms[name] = shown, form
        if len(self.tools) > MAX_TOOLS:
            raise Refusal(f"At most {MAX_TOOLS} tools are accepted in all.", param="tools")


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model calls a tool: chat templates know no namespaces."""
    return name if not namespace else f"{namespace.rstrip('_')}__{name.lstrip('_')}"


def called_name(item: PlacedObject) -> str:
    """Return the flat name of the tool in a call or choice."""
    namespace = None if item.get("namespace") is None else item.name("namespace")
    return flat_name(item.name("name"), namespace)


def sealed(reasoning: str) -> str:
    """Encode thoughts, without encryption, for the field that clients return unread."""
    return _SEALED + base64.b64encode(reasoning.encode()).decode()


def _unsealed(text: str) -> str:
    """Decode sealed thoughts; return "" for another server's."""
    if not text.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(text.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


@dataclass(slots=True)
class _ItemReader:
    """Reads a request's input items.

    tools: collects tools declared among the items. ignored: paths of parts that were left out.
    """

    tools: ToolSet
    ignored: list[str] = field(default_factory=list)

    def turns(self, items: object) -> list[Turn]:
        """Return the items as turns. Raise Refusal, with the path, for anything unreadable."""
        if isinstance(items, str):
            return [Turn("user", items)]
        read = map(self._turn, objects_at(items, "input", MAX_MESSAGES))
        return [turn for turn in read if turn is not None]

    def _turn(self, item: PlacedObject) -> Turn | None:
        """Return one item as a turn, or None if it has no text."""
        kind = item.text("type") if "type" in item.fields else "message"
        if kind == "message":
            role = _ROLES[item.one_of("role", _ROLES)]
            return Turn(role, _words(item.get("content"), item.at("content")))
        if kind == "reasoning":
            return Turn("assistant", "", _thoughts(item))
        if kind in ("function_call", "custom_tool_call"):
            return Turn("assistant", "", tool_calls=(_call(item),))
        if kind in ("function_call_output", "custom_tool_call_output"):
            text = _words(item.get("output"), item.at("output"), self.ignored)
            return Turn("tool", text, tool_call_id=item.name("call_id"))
        if kind == "additional_tools":
            self.tools.add(item.get("tools"), item.at("tools"))
            return None
        if kind in _HOSTED_ITEMS:
            self.ignored.append(item.at(kind))
            return None
        raise Refusal(
            f"{item.where}: items of type {kind[:80]!r:.80} are not supported: nothing is stored "
            "here, and texts, tool calls and their outputs are what is read.",
            param=item.where,
            code="unsupported",
        )


def _call(item: PlacedObject) -> ToolCall:
    if item.fields["type"] == "function_call":
        arguments = item.text("arguments") or "{}"
    else:
        arguments = custom_arguments(item.text("input"))
    return ToolCall(item.name("call_id"), called_name(item), arguments)


def _thoughts(item: PlacedObject) -> str:
    """Return the sealed thoughts of an item or, if there are none, their summary."""
    for name in ("content", "summary"):
        if text := _words(item.get(name, []), item.at(name)):
            return text
    return _unsealed(item.text("encrypted_content", ""))


def _words(value: object, where: str, ignored: list[str] | None = None) -> str:
    return words_of(value, where, "parts", _TEXT_FIELDS, ignored)


# --- The answer ------------------------------------------------------------------------------


class _ItemType(NamedTuple):
    """Description of a type of output items.

    prefix: of their ids. events: name of their text's events. field: field of that text; `text` is
    inside a part of the item. of_part, of_event: further fields of parts and events.
    """

    prefix: str
    events: str
    field: str = "text"
    of_part: JsonObject = {}
    of_event: JsonObject = {}


_ITEM_TYPES = {
    "message": _ItemType(
        "msg",
        "output_text",
        of_part={"annotations": [], "logprobs": []},
        of_event={"logprobs": []},  # where they are missing, openai-python fails
    ),
    "reasoning": _ItemType("rs", "reasoning_text"),
    "function_call": _ItemType("fc", "function_call_arguments", "arguments"),
    "custom_tool_call": _ItemType("ctc", "custom_tool_call_input", "input"),
}


class ResponseReply(Reply):
    """Builds one response and its events, each with a `sequence_number`.

    response: the response without output. forms: the tools' forms for the client. seals: thoughts
    also go into the field that clients return unread.
    """

    def __init__(
        self, response: JsonObject, forms: Mapping[str, ToolForm], seals: bool = False
    ) -> None:
        self._output: list[JsonObject] = []
        self.response = response | {"status": "in_progress", "output": self._output}
        self._forms, self._seals = forms, seals
        self._item: JsonObject = {}  # that is being written
        self._texts: list[str] = []  # of it
        self._input = CustomInput()  # of it, if it is a custom tool's
        self._num_events = 0
        self._prefilled = Prefilled(0, 0)

    def ping(self) -> JsonObject:
        done, total = self._prefilled.num_done, self._prefilled.num_total
        progress = {"prompt_tokens_done": done, "prompt_tokens": total}
        return self._of_response("response.in_progress") | {"lowtide": progress}

    def frames(self, piece: Piece, index: int = 0) -> Iterator[JsonObject]:
        if not self._num_events:
            yield self._of_response("response.created")
            yield self._of_response("response.in_progress")
        match piece:
            case Prefilled():
                self._prefilled = piece
            case Reasoning():
                yield from self._in_item("reasoning", piece, summary=[], content=[])
            case Text():
                yield from self._in_item("message", piece, role="assistant", content=[])
            case CallBegun(_, call_id, name):
                yield from self._open_call(call_id, self._forms.get(name, ToolForm(name)))
            case CallArguments(_, text) if self._item:
                is_custom = self._item["type"] == "custom_tool_call"
                yield from self._delta(self._input.push(text) if is_custom else text)
            case Done():
                yield from self._end(piece)

    def failed(self, refusal: Refusal) -> JsonObject:
        code = refusal.code or "server_error"
        self.response |= {"status": "failed", "error": {"code": code, "message": refusal.message}}
        return self._of_response("response.failed")

    def whole(self) -> JsonObject:
        return self.response

    def _in_item(self, kind: str, more: Text | Reasoning, **fields: Any) -> Iterator[JsonObject]:
        """Add to the open item of this kind, or open a new one."""
        if self._item.get("type") != kind or more.is_new_part:
            yield from self._open(kind, **fields)
        yield from self._delta(more.text)

    def _open_call(self, call_id: str, form: ToolForm) -> Iterator[JsonObject]:
        kind = "custom_tool_call" if form.is_custom else "function_call"
        of_call = {"call_id": call_id, "name": form.name}
        if form.namespace is not None:
            of_call["namespace"] = form.namespace
        yield from self._open(kind, **of_call, **{_ITEM_TYPES[kind].field: ""})

    def _open(self, kind: str, **fields: Any) -> Iterator[JsonObject]:
        yield from self._close("completed")
        head = {"id": new_id(f"{_ITEM_TYPES[kind].prefix}_"), "type": kind, "status": "in_progress"}
        self._item, self._texts, self._input = {**head, **fields}, [], CustomInput()
        self._output.append(self._item)
        yield self._of_output("response.output_item.added", item=dict(self._item))
        yield from self._of_part("added")

    def _delta(self, text: str) -> Iterator[JsonObject]:
        self._texts.append(text)
        if text or self._item["type"] != "custom_tool_call":
            yield self._of_text("delta", delta=text)

    def _close(self, status: str) -> Iterator[JsonObject]:
        item = self._item
        if not item:
            return
        item["status"] = status
        if item["type"] == "custom_tool_call":
            yield from self._delta(self._input.finish())
        name, text = _ITEM_TYPES[item["type"]].field, "".join(self._texts)
        if name != "text":
            item[name] = text
        elif item["type"] == "reasoning" and self._seals:
            item["encrypted_content"] = sealed(text)
        of_call = {"name": item["name"]} if item["type"] == "function_call" else {}
        yield self._of_text("done", **of_call, **{name: text})
        yield from self._of_part("done")
        yield self._of_output("response.output_item.done", item=dict(item))
        self._item = {}

    def _end(self, done: Done) -> Iterator[JsonObject]:
        is_cut = done.reason == "length"
        status = "incomplete" if is_cut else "completed"
        yield from self._close(status)
        self.response["status"] = status
        if is_cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())
        self.response["usage"] = _usage(done)
        yield self._of_response(f"response.{status}")

    def _of_response(self, kind: str) -> JsonObject:
        shown = dict(self.response, output=[dict(item) for item in self._output])
        return self._numbered({"type": kind, "response": shown})

    def _of_part(self, ending: str) -> Iterator[JsonObject]:
        """Yield an event of a text item's only part."""
        form = _ITEM_TYPES[self._item["type"]]
        if form.field == "text":
            part = {"type": form.events, "text": "".join(self._texts), **form.of_part}
            self._item["content"] = [part] if ending == "done" else []
            kind = f"response.content_part.{ending}"
            yield self._of_output(kind, item_id=self._item["id"], content_index=0, part=part)

    def _of_text(self, ending: str, **fields: str) -> JsonObject:
        form = _ITEM_TYPES[self._item["type"]]
        place = {"content_index": 0} if form.field == "text" else {}
        own = {"item_id": self._item["id"], **place, **fields, **form.of_event}
        return self._of_output(f"response.{form.events}.{ending}", **own)

    def _of_output(self, kind: str, **fields: Any) -> JsonObject:
        return self._numbered({"type": kind, "output_index": len(self._output) - 1, **fields})

    def _numbered(self, event: JsonObject) -> JsonObject:
        event["sequence_number"] = self._num_events
        self._num_events += 1
        return event


def _usage(done: Done) -> JsonObject:
    return {
        "input_tokens": done.num_prompt,
        "input_tokens_details": {"cached_tokens": done.num_resumed},
        "output_tokens": done.num_new,
        "output_tokens_details": {"reasoning_tokens": done.num_reasoning},
        "total_tokens": done.num_prompt + done.num_new,
    }


def _response(service: Service, body: ResponsesBody, params: SamplingParams) -> JsonObject:
    """Return the response before its output: the request as it was understood."""
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
    """Return a tool in a response's form, with all fields of a function."""
    unset = {"description": None, "parameters": None, "strict": None}
    return unset | tool if tool["type"] == "function" else tool
