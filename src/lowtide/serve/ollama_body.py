"""Requests of Ollama's API: bodies, messages and options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lowtide.files.long_json import write_json
from lowtide.params import SamplingParams
from lowtide.parsing.tools import Tool
from lowtide.serve.agent_api import check_request_depth, check_sampling, effort_options
from lowtide.serve.conversation import Conversation, ToolCall, Turn
from lowtide.serve.errors import Refusal
from lowtide.serve.grammar_text import Constraint
from lowtide.serve.json_fields import PlacedObject, objects_at
from lowtide.serve.openai_fields import (
    MAX_CALLS,
    MAX_INTEGER,
    MAX_MESSAGES,
    MAX_TOOLS,
    DrawFields,
    check_num_fields,
)
from lowtide.serve.service import Ask


class OllamaFields(BaseModel):
    """Fields of a request. Null is as good as left out: clients send all that they know of."""

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
    """The options that choose words; what is not known is about memory and threads, which are not
    a request's to set.
    """

    num_predict: int | None = Field(None, ge=-2, le=MAX_INTEGER)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, alias="repeat_penalty")

    def params(self) -> SamplingParams:
        """A length of -1 or -2 asks for no end, and gets the default one. Raises Refusal."""
        check_sampling(self.model_extra or {})
        length = self.num_predict or 0
        return self.drawn(length if length > 0 else None)


class OllamaBody(OllamaFields):
    """What `chat` and `generate` have in common."""

    model: str = Field(max_length=512)
    stream: bool | None = None
    options: OllamaOptions = Field(default_factory=lambda: OllamaOptions.model_validate({}))
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: Any = None

    def ask(self, conversation: Conversation | None, prompt: str | None = None) -> Ask:
        """Raises Refusal or UsageError for what cannot be asked."""
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
        """What is taken and not used."""
        options = [f"options.{name}" for name in self.options.model_extra or {}]
        unused = [] if self.keep_alive is None else ["keep_alive"]
        return [*unused, *options, *(self.model_extra or {})]

    def _constraint(self) -> Constraint | None:
        """What the answer's text must be. Raises Refusal or UsageError."""
        if self.format in (None, ""):
            return None
        if self.format == "json":
            return Constraint.json_object()
        if not isinstance(self.format, dict):
            raise Refusal('format must be "json" or a JSON schema.', param="format")
        return Constraint.json_schema(self.format)


class OllamaChatBody(OllamaBody):
    """What `/api/chat` is asked. Without messages the model is to be loaded, which it is."""

    messages: list[Any] = Field([], max_length=MAX_MESSAGES)
    tools: list[Any] = Field([], max_length=MAX_TOOLS)

    def conversation(self) -> Conversation:
        """Raises Refusal for what cannot be read, by its place."""
        tools = tuple(map(_tool, objects_at(self.tools, "tools", MAX_TOOLS)))
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

    def asked(self, has_template: bool) -> Ask:
        """The prompt as what a user says; without a template as it is. Raises as `ask`."""
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
    """Reads messages. Calls have no ids in this API: they get one by their place, and a tool's
    outputs answer the calls before them in order.
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
        """The id of the call that an output is of: named, the first of its tool, or the first."""
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
