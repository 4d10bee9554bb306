"""`POST /v1/chat/completions`: OpenAI's chat completions.

`ChatBody.asks` maps a request's fields to `Ask`s. `ChatReply.choices` maps each kind of piece of an
answer to a stream's choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from lowtide.decode.request import TokenLogprobs
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.params import MAX_TOP_LOGPROBS
from lowtide.parsing.pieces import (
    CallArguments,
    CallBegun,
    Done,
    Logprobs,
    Piece,
    Reasoning,
    Text,
)
from lowtide.parsing.pieces import joined as joined_pieces
from lowtide.parsing.tools import Tool
from lowtide.serve.agent_api import Effort, effort_options
from lowtide.serve.conversation import (
    Conversation,
    ToolCall,
    Turn,
    callable_tools,
    calls_in,
    checked_choice,
    joined,
)
from lowtide.serve.custom_tools import CustomInput, custom_arguments, custom_tool
from lowtide.serve.errors import Refusal
from lowtide.serve.grammar_text import Constraint
from lowtide.serve.json_body import JsonRoute
from lowtide.serve.json_fields import MAX_NAME_CHARS, MAX_PARTS, unsupported, words_of
from lowtide.serve.openai_fields import (
    MAX_CALLS,
    MAX_INTEGER,
    MAX_MESSAGES,
    MAX_TOOLS,
    OpenAIFields,
)
from lowtide.serve.openai_reply import OpenAIReply, several, token_text
from lowtide.serve.reply import JsonObject
from lowtide.serve.service import Ask, Service

_RESERVED = ("messages", "tools", "add_generation_prompt", "chat_template")

_THOUGHT_PARTS = {"thinking": "thinking", "reasoning": "text", "redacted_thinking": ""}
"""Type of a part with an assistant's thoughts -> the field with its text."""

_TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def router_of(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post(ChatReply.path)
    def chat_completions(body: ChatBody) -> Response:
        service.check_model(body.model)
        service.check_num_answers(body.n, "n")
        return ChatReply(service, body, body.asks()).response()

    return router


# --- The request -----------------------------------------------------------------------------


class NamedFunction(BaseModel):
    """Object that names a function, as in `tool_choice`."""

    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)


class CalledFunction(NamedFunction):
    """A function's name and a call's arguments."""

    arguments: str = ""


class CalledCustom(NamedFunction):
    """A custom tool's name and a call's input."""

    input: str = ""


class CallField(BaseModel):
    """An assistant's call of a function or a custom tool."""

    id: str = Field("", max_length=MAX_NAME_CHARS)
    type: Literal["function", "custom"] = "function"
    function: CalledFunction | None = None
    custom: CalledCustom | None = None

    def call(self, where: str) -> ToolCall:
        """Return the call. Raise Refusal if it names no tool."""
        if self.type == "custom" and self.custom is not None:
            return ToolCall(self.id, self.custom.name, custom_arguments(self.custom.input))
        if self.type == "custom" or self.function is None:
            raise Refusal(f"{where}.{self.type}: Field required", param=where)
        return ToolCall(self.id, self.function.name, self.function.arguments)


class ChatMessage(BaseModel):
    """One message. Unknown fields are ignored unless they contain text."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[CallField], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = Field(None, max_length=MAX_NAME_CHARS)

    def turn(self, where: str) -> Turn:
        """Return the message as a turn. Raise Refusal, with the path, for non-text content."""
        for name in ("function_call", "audio", "images"):
            if (self.model_extra or {}).get(name):
                raise unsupported(f"{where}.{name}", "such fields")
        content, thoughts = self.content or "", ""
        if self.role == "assistant" and isinstance(content, list):
            thoughts = joined([_thought(part) for part in content])
            content = [part for part in content if part.get("type") not in _THOUGHT_PARTS]
        text = words_of(content, f"{where}.content", "parts", _TEXT_FIELDS)
        if self.role == "tool":
            return Turn(self.role, text, tool_call_id=self.tool_call_id or "")
        if self.role != "assistant":
            return Turn("system" if self.role == "developer" else self.role, text)
        made = enumerate(self.tool_calls or ())
        calls = [call.call(f"{where}.tool_calls[{i}]") for i, call in made]
        reasoning = self.reasoning_content or self.reasoning or thoughts
        return Turn(self.role, text, reasoning, tuple(calls))


def _thought(part: Mapping[str, Any]) -> str:
    """Return the thoughts in a part of an assistant's message: a text, or a list of texts."""
    told = part.get(_THOUGHT_PARTS.get(part.get("type", ""), ""))
    if isinstance(told, list):
        told = joined(
            [t for p in told if isinstance(p, dict) and isinstance(t := p.get("text"), str)]
        )
    return told if isinstance(told, str) else ""


class DeclaredFunction(NamedFunction):
    """A function's declaration. With `strict`, its arguments always fit the schema."""

    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class GrammarField(BaseModel):
    """The grammar of a custom tool's text."""

    syntax: str = Field(max_length=MAX_NAME_CHARS)
    definition: str


class CustomFormat(BaseModel):
    """The format of a custom tool's text."""

    type: Literal["text", "grammar"]
    grammar: GrammarField | None = None


class DeclaredCustom(NamedFunction):
    """A custom tool's declaration; the tool takes one text."""

    description: str | None = None
    format: CustomFormat | None = None


class ToolField(BaseModel):
    """A tool that the model may call."""

    type: Literal["function", "custom"]
    function: DeclaredFunction | None = None
    custom: DeclaredCustom | None = None

    @property
    def name(self) -> str:
        """The tool's name; "" without a declaration."""
        declared = self.custom if self.type == "custom" else self.function
        return "" if declared is None else declared.name

    def tool(self, where: str) -> Tool:
        """Return the tool. Raise Refusal if its declaration is missing."""
        function, custom = self.function, self.custom
        if self.type == "custom" and custom is not None:
            format = custom.format
            grammar = None if format is None else format.grammar
            if format is not None and format.type == "grammar" and grammar is None:
                place = f"{where}.custom.format.grammar"
                raise Refusal(f"{place}: Field required", param=place)
            asked = None if grammar is None else (grammar.syntax, grammar.definition)
            return custom_tool(custom.name, custom.description or "", asked)
        if self.type == "custom" or function is None:
            raise Refusal(f"{where}.{self.type}: Field required", param=where)
        parameters, strict = function.parameters or {}, bool(function.strict)
        return Tool(function.name, function.description or "", parameters, strict)


class NamedChoice(BaseModel):
    """A tool named in `tool_choice` or `allowed_tools`."""

    type: Literal["function", "custom"]
    function: NamedFunction | None = None
    custom: NamedFunction | None = None

    def name(self) -> str:
        """The tool's name. Raises Refusal if it is missing."""
        named = self.custom if self.type == "custom" else self.function
        if named is None:
            raise Refusal(f"tool_choice.{self.type}: Field required", param="tool_choice")
        return named.name


class AllowedTools(BaseModel):
    """The tools that may be called. mode: `required` if one of them must be."""

    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedChoice] = Field(max_length=MAX_TOOLS)


class AllowedChoice(BaseModel):
    """A `tool_choice` that allows only some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedChoice | AllowedChoice


class SchemaFormat(BaseModel):
    """A JSON schema that the answer must fit."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field("", max_length=256)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """The required format of the answer's text."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None

    def constraint(self) -> Constraint | None:
        """Return the constraint, None for plain text. Raise Refusal or UsageError."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Constraint.json_object()
        if self.json_schema is None:
            raise Refusal("response_format.json_schema is missing.", param="response_format")
        return Constraint.json_schema(self.json_schema.schema_)


class StructuredOutputs(BaseModel):
    """The answer's format in vLLM's form; one field is set.

    regex: in Rust's syntax. grammar: in Lark.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    json_: dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    grammar: str | None = None

    def constraint(self) -> Constraint:
        """Return the constraint. Raise Refusal or UsageError."""
        forms = [
            None if self.json_ is None else Constraint.json_schema(self.json_),
            None if self.regex is None else Constraint.regex(self.regex),
            None if self.grammar is None else Constraint.lark(self.grammar),
        ]
        asked = [form for form in forms if form is not None]
        if len(asked) != 1:
            raise Refusal(
                "structured_outputs has one of json, regex and grammar.", param="structured_outputs"
            )
        return asked[0]


class ChatBody(OpenAIFields):
    """A request; `OpenAIFields` has the fields shared with completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INTEGER)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[ToolField] = Field([], max_length=MAX_TOOLS)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] = {}
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    def asks(self) -> list[Ask]:
        """Return one Ask per answer. Raise Refusal or UsageError."""
        conversation, tool_choice = self._conversation_and_choice()
        self._check_end(conversation)
        ask = Ask(
            conversation,
            params=self.sampling(self.max_completion_tokens or self.max_tokens, self._num_top()),
            template_options=self._template_options(),
            tool_choice=tool_choice,
            constraint=self._constraint(),
            wants_frames=bool(self.stream_options.include_drafts),
            wants_progress=self.return_progress,
            parallel_calls=self.parallel_tool_calls,
        )
        return several(ask, self.n)

    def _conversation_and_choice(self) -> tuple[Conversation, str]:
        """Return the conversation with its callable tools, and the choice among them."""
        turns = tuple(each.turn(f"messages[{i}]") for i, each in enumerate(self.messages))
        tools = callable_tools(each.tool(f"tools[{i}]") for i, each in enumerate(self.tools))
        names, choice = {tool.name for tool in tools}, self.tool_choice
        if isinstance(choice, str):
            return Conversation(turns, tools), checked_choice(choice, False, names)
        if isinstance(choice, NamedChoice):
            return Conversation(turns, tools), checked_choice(choice.name(), True, names)
        allowed = {checked_choice(each.name(), True, names) for each in choice.allowed_tools.tools}
        tools = tuple(tool for tool in tools if tool.name in allowed)
        mode = checked_choice(choice.allowed_tools.mode, False, allowed)
        return Conversation(turns, tools), mode

    def _check_end(self, conversation: Conversation) -> None:
        """Raise Refusal if vLLM's two fields contradict the end of the conversation.

        If the last message is an assistant's, it is continued. Otherwise a generation prompt
        follows.
        """
        is_begun = conversation.is_begun
        for name, wanted in (
            ("continue_final_message", is_begun),
            ("add_generation_prompt", not is_begun),
        ):
            if getattr(self, name) not in (None, wanted):
                last = "an answer that is begun, which is continued" if is_begun else "no answer"
                raise Refusal(
                    f"{name} must be {str(wanted).lower()}, or left out: the last message is "
                    f"{last}.",
                    param=name,
                )

    def _num_top(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise Refusal("top_logprobs needs logprobs: true.", param="top_logprobs")
        return self.top_logprobs if self.logprobs else None

    def _constraint(self) -> Constraint | None:
        format, form = self.response_format, self.structured_outputs
        constraint = None if format is None else format.constraint()
        if form is None:
            return constraint
        if constraint is not None:
            raise Refusal(
                "response_format and structured_outputs both form the answer: leave one out.",
                param="structured_outputs",
            )
        return form.constraint()

    def _template_options(self) -> dict[str, object]:
        for name in _RESERVED:
            if name in self.chat_template_kwargs:
                raise Refusal(
                    f"chat_template_kwargs.{name} is not a request's to set.",
                    param="chat_template_kwargs",
                )
        return {**effort_options(self.reasoning_effort), **self.chat_template_kwargs}


# --- The answer ------------------------------------------------------------------------------


class ChatReply(OpenAIReply[ChatBody]):
    """Builds chunks and choices; holds log-probabilities back until their text comes."""

    path = "/v1/chat/completions"
    id_prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatBody, asks: Sequence[Ask]) -> None:
        super().__init__(service, body, asks)
        self._held: dict[int, tuple[TokenLogprobs, ...]] = {}  # by answer
        kinds = {tool.name: tool.type for tool in body.tools}
        self._custom = {name for name, kind in kinds.items() if kind == "custom"}
        self._inputs: dict[int, tuple[int, CustomInput]] = {}  # by answer: a call being written

    def first_choices(self) -> Iterator[JsonObject]:
        for index in range(self.body.n):
            yield self.choice(index, {"role": "assistant", "content": ""})

    def choice(
        self,
        index: int,
        delta: Mapping[str, Any] = {},
        end: Done | None = None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> JsonObject:
        choice: JsonObject = {"index": index, "delta": delta}
        choice["logprobs"] = logprob_content(logprobs, self.tokenizer) if logprobs else None
        choice["finish_reason"] = None if end is None else end.reason
        if end is not None and self.body.return_token_ids:
            choice["token_ids"] = list(end.token_ids)
        return choice

    def choices(self, piece: Piece, index: int) -> Iterator[JsonObject]:
        if not isinstance(piece, Logprobs | CallArguments):
            yield from self._end_of_input(index)
        match piece:
            case Logprobs(tokens):
                self._held[index] = self._held.get(index, ()) + tokens
            case Text():
                yield self._worded(index, {"content": piece.joined_text})
            case Reasoning():
                text = piece.joined_text
                yield self._worded(index, {"reasoning_content": text, "reasoning": text})
            case CallBegun(place, call_id, name) if name in self._custom:
                self._inputs[index] = place, CustomInput()
                custom = {"name": name, "input": ""}
                yield self._called(index, place, id=call_id, type="custom", custom=custom)
            case CallBegun(place, call_id, name):
                function = {"name": name, "arguments": ""}
                yield self._called(index, place, id=call_id, type="function", function=function)
            case CallArguments(place, text) if index in self._inputs:
                if more := self._inputs[index][1].push(text):
                    yield self._called(index, place, custom={"input": more})
            case CallArguments(place, text):
                yield self._called(index, place, function={"arguments": text})
            case Done():
                if index in self._held:
                    yield self._worded(index, {})
                yield self.choice(index, end=piece)

    def whole_choice(self, index: int, pieces: Sequence[Piece], end: Done) -> JsonObject:
        text, reasoning = joined_pieces(pieces, Text), joined_pieces(pieces, Reasoning)
        calls = [self._call_object(call) for call in calls_in(pieces)]
        message: JsonObject = {"role": "assistant", "content": text if text or not calls else None}
        if reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls:
            message["tool_calls"] = calls
        tokens = [token for p in pieces if isinstance(p, Logprobs) for token in p.tokens]
        choice: JsonObject = {"index": index, "message": message, "finish_reason": end.reason}
        choice["logprobs"] = logprob_content(tokens, self.tokenizer) if self.body.logprobs else None
        if self.body.return_token_ids:
            choice["token_ids"] = list(end.token_ids)
        return choice

    def _worded(self, index: int, delta: JsonObject) -> JsonObject:
        """Return a choice with the log-probabilities held back for it."""
        return self.choice(index, delta, logprobs=self._held.pop(index, ()))

    def _called(self, index: int, place: int, **fields: Any) -> JsonObject:
        """Return a choice that adds to the answer's call number `place`."""
        return self._worded(index, {"tool_calls": [{"index": place, **fields}]})

    def _end_of_input(self, index: int) -> Iterator[JsonObject]:
        """Yield the rest of a finished custom call's text."""
        place, custom = self._inputs.pop(index, (0, None))
        rest = "" if custom is None else custom.finish()
        if rest:
            delta = {"tool_calls": [{"index": place, "custom": {"input": rest}}]}
            yield self.choice(index, delta)

    def _call_object(self, call: ToolCall) -> JsonObject:
        if call.name in self._custom:
            text = CustomInput()
            told = {"name": call.name, "input": text.push(call.arguments) + text.finish()}
            return {"id": call.id, "type": "custom", "custom": told}
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": call.id, "type": "function", "function": function}


def logprob_content(tokens: Sequence[TokenLogprobs], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return log-probabilities in the form of chat completions."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = None if tokenizer is None else tokenizer.piece_bytes(token_id)
        return {
            "token": token_text(token_id, tokenizer),
            "logprob": logprob,
            "bytes": None if data is None else list(data),
        }

    content = [
        {
            **entry(token.token_id, token.logprob),
            "top_logprobs": [entry(token_id, value) for token_id, value in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}
