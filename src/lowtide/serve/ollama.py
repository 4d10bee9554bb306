"""Ollama's API, as far as its clients need it to talk to the loaded model.

`OllamaBody.ask` maps a request's fields to an `Ask`. `OllamaReply.frames` maps each kind of piece
of an answer to lines of JSON.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from lowtide.files.long_json import write_json
from lowtide.model_folder.gguf_file import is_gguf
from lowtide.params import SamplingParams
from lowtide.parsing import has_thoughts
from lowtide.parsing.call_json import parsed
from lowtide.parsing.pieces import CallArguments, CallBegun, Done, Piece, Prefilled, Reasoning, Text
from lowtide.parsing.tools import Tool
from lowtide.plan import OWN_FORMAT
from lowtide.schemas import model_schema
from lowtide.serve.agent_api import check_request_depth, check_sampling, effort_options, headers_of
from lowtide.serve.conversation import (
    Conversation,
    ToolCall,
    Turn,
    arguments_of,
    callable_tools,
)
from lowtide.serve.errors import NoEmbeddings, Refusal
from lowtide.serve.grammar_text import Constraint
from lowtide.serve.json_body import JsonRoute
from lowtide.serve.json_fields import PlacedObject, objects_at
from lowtide.serve.openai_fields import (
    MAX_CALLS,
    MAX_INTEGER,
    MAX_MESSAGES,
    MAX_TOOLS,
    DrawFields,
    check_num_fields,
)
from lowtide.serve.reply import JsonObject, Reply, answered, json_response
from lowtide.serve.service import Ask, Service
from lowtide.serve.sse import compact_json

VERSION = "0.20.0"
"""The version of Ollama's API: editors ask for at least 0.6.4, Codex for at
least 0.13.4."""

NDJSON = "application/x-ndjson"

_NEVER = "2318-01-01T00:00:00Z"
"""Expiry of a model that stays loaded."""


def router_of(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)
    _add_answers(router, service)
    _add_facts(router, service)

    @router.post("/api/pull")
    async def pull(body: OllamaModelBody) -> Response:
        _check_model(service, body.model or body.name)
        if body.stream is False:
            return json_response({"status": "success"})
        lines = (json_line({"status": status}) for status in ("pulling manifest", "success"))
        return Response(b"".join(lines), media_type=NDJSON)

    @router.post("/api/embed")
    @router.post("/api/embeddings")
    async def embed() -> Response:
        raise NoEmbeddings

    return router


def _check_model(service: Service, name: str) -> None:
    """Raise Refusal if the name is missing or not the loaded model's."""
    if not name:
        raise Refusal("The request names no model.", param="model")
    service.check_model(name)


def _add_answers(router: APIRouter, service: Service) -> None:
    @router.post("/api/chat")
    def chat(body: OllamaChatBody) -> Response:
        _check_model(service, body.model)
        conversation = body.conversation()
        ask = body.ask(conversation) if conversation.turns else None
        return _answered(service, body, ask, is_chat=True)

    @router.post("/api/generate")
    def generate(body: OllamaGenerateBody) -> Response:
        _check_model(service, body.model)
        body.check()
        ask = body.asked(service.llm.has_chat_template) if body.prompt else None
        return _answered(service, body, ask, is_chat=False)


def _answered(service: Service, body: OllamaBody, ask: Ask | None, is_chat: bool) -> Response:
    """Answer a request; without an Ask it only wants the model loaded, which it is."""
    reply = OllamaReply(service.model_name, is_chat)
    if ask is None:
        return json_response(reply.loaded())
    headers = headers_of(service, service.model_name, body.ignored())
    return answered(service, [ask], reply, body.stream is not False, headers)


# --- The request ----------------------------------------------------------------------------


class OllamaFields(BaseModel):
    """A request's fields. Null counts as left out: clients send every field they know."""

    model_config = ConfigDict(extra="allow", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        check_num_fields(body)
        check_request_depth(body)
        return {name: value for name, value in body.items() if value is not None}


class OllamaOptions(OllamaFields, DrawFields):
    """Options that affect words. Unknown ones concern memory and threads, and are ignored."""

    num_predict: int | None = Field(None, ge=-2, le=MAX_INTEGER)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, alias="repeat_penalty")

    def params(self) -> SamplingParams:
        """Return the sampling parameters; a length of -1 or -2 means the default. Raise Refusal."""
        check_sampling(self.model_extra or {})
        length = self.num_predict or 0
        return self.drawn(length if length > 0 else None)


class OllamaBody(OllamaFields):
    """Fields shared by `/api/chat` and `/api/generate`."""

    model: str = Field(max_length=512)
    stream: bool | None = None
    options: OllamaOptions = Field(default_factory=lambda: OllamaOptions.model_validate({}))
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: Any = None

    def ask(self, conversation: Conversation | None, prompt: str | None = None) -> Ask:
        """Return the Ask. Raise Refusal or UsageError."""
        thinking = {} if self.think is None else {"enable_thinking": self.think is not False}
        return Ask(
            conversation=conversation,
            prompt=prompt,
            params=self.options.params(),
            template_options={**thinking, **effort_options(self.think)},
            constraint=self._constraint(),
            wants_progress=True,
            cut_to_room=True,
        )

    def ignored(self) -> list[str]:
        """Return the fields that are accepted and ignored."""
        options = [f"options.{name}" for name in self.options.model_extra or {}]
        unused = [] if self.keep_alive is None else ["keep_alive"]
        return [*unused, *options, *(self.model_extra or {})]

    def _constraint(self) -> Constraint | None:
        """Return the constraint on the answer's text. Raise Refusal or UsageError."""
        if self.format in (None, ""):
            return None
        if self.format == "json":
            return Constraint.json_object()
        if not isinstance(self.format, dict):
            raise Refusal('format must be "json" or a JSON schema.', param="format")
        return Constraint.json_schema(self.format)


class OllamaChatBody(OllamaBody):
    """A request of `/api/chat`. Without messages it asks for the model to be loaded."""

    messages: list[Any] = Field([], max_length=MAX_MESSAGES)
    tools: list[Any] = Field([], max_length=MAX_TOOLS)

    def conversation(self) -> Conversation:
        """Return the conversation. Raise Refusal, with the path, for anything unreadable."""
        tools = callable_tools(map(_tool, objects_at(self.tools, "tools", MAX_TOOLS)))
        return Conversation(_MessageReader().turns(self.messages), tools)


class OllamaGenerateBody(OllamaBody):
    """A request of `/api/generate`. raw: without the chat template."""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[Any] | None = None
    images: list[Any] | None = None

    def check(self) -> None:
        """Raise Refusal for unsupported fields that would change words."""
        for name in ("suffix", "template", "context", "images"):
            if getattr(self, name):
                raise Refusal(f"{name} is not supported; leave it out.", param=name)

    def asked(self, has_template: bool) -> Ask:
        """Return an Ask with the prompt as a user message or, without a template, as it is."""
        if has_template and not self.raw:
            system = (Turn("system", self.system),) if self.system else ()
            return self.ask(Conversation((*system, Turn("user", self.prompt))))
        for name in ("format",) if self.raw else ("format", "system"):
            if getattr(self, name):
                raise Refusal(f"{name} needs a chat template: leave it out here.", param=name)
        return self.ask(None, self.prompt)

    def ignored(self) -> list[str]:
        beside_raw = [name for name in ("system", "think") if self.raw and getattr(self, name)]
        return [*beside_raw, *super().ignored()]


@dataclass(slots=True)
class _MessageReader:
    """Reads messages.

    Calls have no ids in this API. They get one from their position, and tool outputs are matched to
    the calls before them in order.
    """

    num_calls: int = 0
    unanswered: list[ToolCall] = field(default_factory=list)

    def turns(self, messages: object) -> tuple[Turn, ...]:
        return tuple(map(self._turn, objects_at(messages, "messages", MAX_MESSAGES)))

    def _turn(self, message: PlacedObject) -> Turn:
        role = message.one_of("role", ("system", "user", "assistant", "tool"))
        if message.get("images"):
            place = message.at("images")
            raise Refusal(f"{place}: models read text here.", param=place)
        text = message.text("content", "")
        if role == "tool":
            return Turn(role, text, tool_call_id=self._answered(message))
        if role != "assistant":
            return Turn(role, text)
        self.unanswered = [
            self._call(call) for call in message.objects("tool_calls", MAX_CALLS, [])
        ]
        return Turn(role, text, message.text("thinking", ""), tuple(self.unanswered))

    def _call(self, call: PlacedObject) -> ToolCall:
        function = call.object("function")
        arguments = write_json(function.object("arguments", {}).fields, ensure_ascii=False)
        self.num_calls += 1
        # Nine letters and digits: Mistral's templates take nothing else.
        call_id = call.name("id", f"call{self.num_calls:05}")
        return ToolCall(call_id, function.name("name"), arguments)

    def _answered(self, message: PlacedObject) -> str:
        """Return the id of the call that an output answers.

        It is the named one, else the named tool's first, else the first unanswered.
        """
        if message.get("tool_call_id"):
            return message.name("tool_call_id")
        tool = message.get("tool_name") or message.get("name")
        left = [call for call in self.unanswered if call.name == tool] or self.unanswered
        if not left:
            return ""
        self.unanswered = [call for call in self.unanswered if call is not left[0]]
        return left[0].id


def _tool(tool: PlacedObject) -> Tool:
    function = tool.object("function")
    parameters = function.object("parameters", {}).fields
    return Tool(function.name("name"), function.text("description", ""), parameters)


# --- The answer -----------------------------------------------------------------------------


@dataclass(slots=True)
class OllamaReply(Reply):
    """Builds the lines of one answer.

    is_chat: text stands in a `message`, else in `response`. clock: nanoseconds.
    """

    media_type = NDJSON
    has_named_events = False

    model: str
    is_chat: bool
    clock: Callable[[], int] = time.monotonic_ns
    _texts: list[str] = field(default_factory=list)
    _thoughts: list[str] = field(default_factory=list)
    _calls: list[ToolCall] = field(default_factory=list)
    _call: ToolCall | None = None  # that is being written
    _num_prefilled: int = 0  # pieces
    _start_ns: int = 0
    _begun_ns: int = 0  # when its prompt began to be read
    _first_ns: int = 0  # when the answer began
    _end: JsonObject = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._start_ns = self.clock()

    def frames(self, piece: Piece, index: int = 0) -> Iterator[JsonObject]:
        if not isinstance(piece, Prefilled):
            self._first_ns = self._first_ns or self.clock()
            if not isinstance(piece, CallArguments):
                yield from self._ended_call(piece)
        match piece:
            case Prefilled():
                self._num_prefilled += 1
                if self._num_prefilled == 2:  # the first comes before its turn in the queue
                    self._begun_ns = self.clock()
            case Text():
                self._texts.append(piece.joined_text)
                yield self._line(piece.joined_text)
            case Reasoning():
                self._thoughts.append(piece.joined_text)
                yield self._line("", thinking=piece.joined_text)
            case CallBegun(_, call_id, name):
                self._call = ToolCall(call_id, name, "")
            case CallArguments(_, text) if self._call is not None:
                self._call = replace(self._call, arguments=self._call.arguments + text)
            case Done():
                self._end = self._ended(piece)
                yield self._line("") | self._end

    def encode(self, frame: JsonObject) -> bytes:
        return json_line(frame)

    def ping(self) -> JsonObject:
        return self._line("")

    def failed(self, refusal: Refusal) -> JsonObject:
        return {"error": refusal.message}

    def whole(self) -> JsonObject:
        words: dict[str, Any] = {}
        if self._thoughts:
            words["thinking"] = "".join(self._thoughts)
        if self._calls:
            words["tool_calls"] = list(map(_call_object, self._calls))
        return self._line("".join(self._texts), **words) | self._end

    def loaded(self) -> JsonObject:
        """Return the answer to a request that only loads the model."""
        return self._line("") | {"done": True, "done_reason": "load"}

    def _ended_call(self, piece: Piece) -> Iterator[JsonObject]:
        """Yield the line of the call that a piece ends; none if the maximum length cut it."""
        call, self._call = self._call, None
        if call is None:
            return
        is_cut = isinstance(piece, Done) and piece.reason == "length"
        if is_cut and not isinstance(parsed(call.arguments), Mapping):
            return
        self._calls.append(call)
        yield self._line("", tool_calls=[_call_object(call)])

    def _line(self, text: str, **words: Any) -> JsonObject:
        head = {"model": self.model, "created_at": timestamp(time.time()), "done": False}
        if not self.is_chat:
            return {**head, "response": text, **words}
        return {**head, "message": {"role": "assistant", "content": text, **words}}

    def _ended(self, done: Done) -> JsonObject:
        end_ns = self.clock()
        return {
            "done": True,
            "done_reason": "length" if done.reason == "length" else "stop",
            "total_duration": end_ns - self._start_ns,
            "load_duration": 0,
            "prompt_eval_count": done.num_prompt,
            "prompt_eval_duration": self._first_ns - (self._begun_ns or self._start_ns),
            "eval_count": done.num_new,
            "eval_duration": end_ns - self._first_ns,
        }


def json_line(value: JsonObject) -> bytes:
    """Encode a line of NDJSON."""
    return compact_json(value).encode() + b"\n"


def timestamp(time_s: float) -> str:
    """Format a time as Ollama does."""
    return datetime.fromtimestamp(time_s, UTC).isoformat().replace("+00:00", "Z")


def _call_object(call: ToolCall) -> JsonObject:
    return {"id": call.id, "function": {"name": call.name, "arguments": arguments_of(call)}}


# --- The model ------------------------------------------------------------------------------


class OllamaModelBody(OllamaFields):
    """A request about a model; the field's older name is accepted, too."""

    model: str = Field("", max_length=512)
    name: str = Field("", max_length=512)
    stream: bool | None = None


def _add_facts(router: APIRouter, service: Service) -> None:
    @router.head("/")
    async def alive() -> Response:
        return Response()

    @router.get("/api/version")
    async def version() -> JsonObject:
        return {"version": VERSION}

    @router.get("/api/tags")
    async def tags() -> JsonObject:
        return {"models": [_model(service)]}

    @router.get("/api/ps")
    async def ps() -> JsonObject:
        plan = service.llm.plan
        gpu_bytes = 0 if plan.gpu is None else plan.gpu.used_bytes
        running = {
            "expires_at": _NEVER,
            "size": plan.host.used_bytes + gpu_bytes,
            "size_vram": gpu_bytes,
            "context_length": service.context,
        }
        return {"models": [_model(service) | running]}

    @router.post("/api/show")
    async def show(body: OllamaModelBody) -> JsonObject:
        _check_model(service, body.model or body.name)
        return {
            "modelfile": f"FROM {service.model_name}",
            "parameters": "",
            "template": "",
            "details": _details(service),
            "model_info": _model_info(service),
            "capabilities": _capabilities(service),
            "modified_at": timestamp(service.created),
        }


def _model(service: Service) -> JsonObject:
    """Return the model's list entry. Its digest is of the name: no weights are read."""
    return {
        "name": service.model_name,
        "model": service.model_name,
        "modified_at": timestamp(service.created),
        "size": service.llm.plan.full_bytes,
        "digest": hashlib.sha256(service.model_name.encode()).hexdigest(),
        "details": _details(service),
    }


def _details(service: Service) -> JsonObject:
    config, formats = service.llm.config, service.llm.plan.formats
    changed = [name for name in (formats.experts, formats.dense) if name != OWN_FORMAT]
    return {
        "parent_model": "",
        "format": "gguf" if is_gguf(service.llm.path) else "safetensors",
        "family": config.family,
        "families": [config.family],
        "parameter_size": parameter_size(_num_parameters(service)),
        "quantization_level": changed[0] if changed else config.dtype,
    }


def _model_info(service: Service) -> dict[str, Any]:
    config = service.llm.config
    info = {
        "context_length": service.context,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "vocab_size": config.vocab_size,
    }
    if config.experts is not None:
        info["expert_count"] = config.experts.num_experts
        info["expert_used_count"] = config.experts.num_experts_per_token
    return {
        "general.architecture": config.family,
        "general.parameter_count": _num_parameters(service),
        **{f"{config.family}.{name}": value for name, value in info.items()},
    }


def parameter_size(num_parameters: int) -> str:
    """Format a number of parameters as Ollama does: `30.5B`, `3.8M`."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if num_parameters >= unit:
            return f"{num_parameters / unit:.1f}{name}"
    return str(num_parameters)


def _num_parameters(service: Service) -> int:
    schema = model_schema(service.llm.config)
    return schema.dense_elements + schema.expert_elements


def _capabilities(service: Service) -> list[str]:
    tokenizer = service.llm.tokenizer
    if tokenizer is None:
        return ["completion"]
    tools = ["tools"] if tokenizer.template_names("tools") else []
    return ["completion", *tools, *(["thinking"] if has_thoughts(tokenizer) else [])]
