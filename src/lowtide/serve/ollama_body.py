"""Requests of Ollama's API: bodies, messages and options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lowtide.params import MAX_SEED, SamplingParams
from lowtide.parsing.tools import Tool
from lowtide.serve.agent_api import check_sampling, effort_options
from lowtide.serve.conversation import Conversation, ToolCall, Turn
from lowtide.serve.errors import Refusal
from lowtide.serve.grammar import Constraint, check_depth
from lowtide.serve.json_fields import name_at, object_at, objects_at, text_at
from lowtide.serve.openai_fields import MAX_INTEGER, MAX_STOP_CHARS, MAX_STOPS

_ROLES = ("system", "user", "assistant", "tool")


class OllamaFields(BaseModel):
    """Fields of a request. Null is as good as left out: clients send all that they know of."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        check_depth(body, "The request")
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None}


class OllamaOptions(OllamaFields):
    """The options that choose words; what is not known is about memory and threads, which are not
    a request's to set."""

    num_predict: int | None = Field(None, ge=-2, le=MAX_INTEGER)
    temperature: float | None = Field(None, ge=0, le=100)
    top_k: int | None = Field(None, ge=-1, le=MAX_INTEGER)
    top_p: float | None = Field(None, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=MAX_SEED)
    stop: str | list[str] | None = None
    repeat_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)

    def params(self) -> SamplingParams:
        """A length of -1 or -2 asks for no end, and gets the default one. Raises Refusal."""
        check_sampling(self.model_extra or {})
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > MAX_STOPS or any(len(each) > MAX_STOP_CHARS for each in stop):
            raise Refusal(
                f"options.stop: at most {MAX_STOPS} texts of {MAX_STOP_CHARS} characters.",
                param="options.stop",
            )
        return SamplingParams(
            max_tokens=self.num_predict if self.num_predict and self.num_predict > 0 else None,
            temperature=self.temperature,
            top_k=self.top_k if self.top_k and self.top_k > 0 else None,
            top_p=self.top_p or None,
            min_p=self.min_p or None,
            repetition_penalty=None if self.repeat_penalty == 1 else self.repeat_penalty,
            presence_penalty=self.presence_penalty or None,
            frequency_penalty=self.frequency_penalty or None,
            seed=None if self.seed is None else self.seed % (MAX_SEED + 1),
            stop=[each for each in stop if each],
        )


class OllamaBody(OllamaFields):
    """What `chat` and `generate` have in common."""

    model: str = Field(max_length=512)
    stream: bool | None = None
    options: OllamaOptions = Field(default_factory=lambda: OllamaOptions.model_validate({}))
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: Any = None

    def template_options(self) -> dict[str, object]:
        """Whether and how much to think; as the model does where nothing is said."""
        if self.think is None:
            return {}
        return {"enable_thinking": self.think is not False, **effort_options(self.think)}

    def constraint(self) -> Constraint | None:
        """What the answer's text must be. Raises Refusal or UsageError."""
        if self.format in (None, ""):
            return None
        if self.format == "json":
            return Constraint.json_object()
        if not isinstance(self.format, dict):
            raise Refusal('format must be "json" or a JSON schema.', param="format")
        return Constraint.json_schema(self.format)

    def ignored(self) -> list[str]:
        """What is taken and not used."""
        options = [f"options.{name}" for name in self.options.model_extra or {}]
        unused = [] if self.keep_alive is None else ["keep_alive"]
        return [*unused, *options, *(self.model_extra or {})]


class OllamaChatBody(OllamaBody):
    """What `/api/chat` is asked. Without messages the model is to be loaded, which it is."""

    messages: list[Any] = Field(default_factory=list)
    tools: list[Any] | None = None

    def conversation(self) -> Conversation:
        """Raises Refusal for what cannot be read, by its place."""
        declared = enumerate(objects_at(self.tools or [], "tools"))
        tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in declared)
        return Conversation(_MessageReader().turns(self.messages), tools)


class OllamaGenerateBody(OllamaBody):
    """What `/api/generate` is asked. raw: the prompt is not put into the chat template."""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[Any] | None = None
    images: list[Any] | None = None

    def check(self) -> None:
        """Raises Refusal for fields that would change words and are not supported."""
        for name in ("suffix", "template", "context", "images"):
            if getattr(self, name):
                raise Refusal(f"{name} is not supported; leave it out.", param=name)

    def conversation(self) -> Conversation:
        """The prompt as what a user says."""
        system = (Turn("system", self.system),) if self.system else ()
        return Conversation((*system, Turn("user", self.prompt)))


@dataclass(slots=True)
class _MessageReader:
    """Reads messages. Calls have no ids in this API: they get one by their place, and a tool's
    outputs answer the calls before them in order."""

    num_calls: int = 0
    unanswered: list[ToolCall] = field(default_factory=list)

    def turns(self, messages: object) -> tuple[Turn, ...]:
        each = enumerate(objects_at(messages, "messages"))
        return tuple(self._turn(message, f"messages[{i}]") for i, message in each)

    def _turn(self, message: Mapping[str, Any], where: str) -> Turn:
        role = message.get("role")
        if role not in _ROLES:
            raise Refusal(f"{where}.role {role!r:.80} is not known.", param=f"{where}.role")
        if message.get("images"):
            raise Refusal(f"{where}.images: models read text here.", param=f"{where}.images")
        text = text_at(message.get("content") or "", f"{where}.content")
        if role == "tool":
            return Turn(role, text, tool_call_id=self._answered(message, where))
        if role != "assistant":
            return Turn(role, text)
        calls = [
            self._call(call, f"{where}.tool_calls[{i}]")
            for i, call in enumerate(objects_at(message.get("tool_calls") or [], where))
        ]
        self.unanswered = list(calls)
        thinking = text_at(message.get("thinking") or "", f"{where}.thinking")
        return Turn(role, text, thinking, tuple(calls))

    def _call(self, call: Mapping[str, Any], where: str) -> ToolCall:
        function = object_at(call.get("function"), f"{where}.function")
        name = name_at(function.get("name"), f"{where}.function.name")
        arguments = object_at(function.get("arguments") or {}, f"{where}.function.arguments")
        self.num_calls += 1
        call_id = name_at(call.get("id") or f"call_{self.num_calls}", f"{where}.id")
        return ToolCall(call_id, name, json.dumps(arguments, ensure_ascii=False))

    def _answered(self, message: Mapping[str, Any], where: str) -> str:
        """The id of the call that an output is of: named, the first of its tool, or the first."""
        given = message.get("tool_call_id")
        if given:
            return name_at(given, f"{where}.tool_call_id")
        tool = message.get("tool_name") or message.get("name")
        left = [call for call in self.unanswered if call.name == tool] or self.unanswered
        if not left:
            return ""
        self.unanswered = [call for call in self.unanswered if call is not left[0]]
        return left[0].id


def _tool(tool: Mapping[str, Any], where: str) -> Tool:
    function = object_at(tool.get("function"), f"{where}.function")
    return Tool(
        name_at(function.get("name"), f"{where}.function.name"),
        text_at(function.get("description") or "", f"{where}.function.description"),
        object_at(function.get("parameters") or {}, f"{where}.function.parameters"),
    )
