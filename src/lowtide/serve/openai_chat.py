"""`POST /v1/chat/completions`, streamed and whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

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
    joined,
)
from lowtide.serve.agent_api import Effort, effort_options
from lowtide.serve.conversation import Conversation, ToolCall, calls_in
from lowtide.serve.custom_tools import CustomInput
from lowtide.serve.errors import Refusal
from lowtide.serve.grammar_text import Constraint
from lowtide.serve.json_body import JsonRoute
from lowtide.serve.openai_fields import MAX_INTEGER, SamplingFields, token_text
from lowtide.serve.openai_messages import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatMessage,
    ToolChoice,
    ToolField,
    chosen_tools,
    conversation_of,
)
from lowtide.serve.openai_reply import OpenAIReply, Part, several
from lowtide.serve.service import Ask, Service
from lowtide.serve.writers import JsonObject

_RESERVED = ("messages", "tools", "add_generation_prompt", "chat_template")


class SchemaFormat(BaseModel):
    """A JSON schema that the answer is certain to be of."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field("", max_length=256)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """What the answer's text is."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None

    def constraint(self) -> Constraint | None:
        """None for plain text. Raises Refusal or UsageError for what cannot be kept to."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Constraint.json_object()
        if self.json_schema is None:
            raise Refusal("response_format.json_schema is missing.", param="response_format")
        return Constraint.json_schema(self.json_schema.schema_)


class StructuredOutputs(BaseModel):
    """The same as vLLM's clients ask for it, one of them. regex: as Rust writes it; grammar: in
    Lark.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    json_: dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    grammar: str | None = None

    def constraint(self) -> Constraint:
        """Raises Refusal or UsageError for what cannot be kept to."""
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


class ChatBody(SamplingFields):
    """A request of a chat completion."""

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
        """One for each answer. Raises Refusal or UsageError for what cannot be asked."""
        declared = conversation_of(self.messages, self.tools)
        conversation, tool_choice = chosen_tools(self.tool_choice, declared)
        self._check_end(conversation)
        if self.top_logprobs and not self.logprobs:
            raise Refusal("top_logprobs needs logprobs: true.", param="top_logprobs")
        num_top = self.top_logprobs if self.logprobs else None
        ask = Ask(
            conversation,
            params=self.sampling(self.max_completion_tokens or self.max_tokens, num_top),
            template_options=self._template_options(),
            tool_choice=tool_choice,
            constraint=self._constraint(),
            wants_frames=bool(self.stream_options.include_drafts),
            wants_progress=self.return_progress,
            parallel_calls=self.parallel_tool_calls,
        )
        return several(ask, self.n)

    def _check_end(self, conversation: Conversation) -> None:
        """Raises Refusal where vLLM's fields say otherwise than the conversation ends: an answer
        that is begun is continued, and any other follows a generation prompt.
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


def router_of(service: Service) -> APIRouter:
    """The route, over one service."""
    router = APIRouter(route_class=JsonRoute)

    @router.post(ChatReply.path)
    def chat_completions(body: ChatBody) -> Response:
        """An answer to a conversation."""
        service.check_model(body.model)
        service.check_num_answers(body.n, "n")
        return ChatReply(service, body, body.asks()).response()

    return router


class ChatReply(OpenAIReply[ChatBody]):
    """Owns log-probabilities until the words that they are of."""

    path = "/v1/chat/completions"
    id_prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatBody, asks: Sequence[Ask]) -> None:
        super().__init__(service, body, asks)
        self._held: dict[int, tuple[TokenLogprobs, ...]] = {}
        self._custom = {tool.custom.name for tool in body.tools if tool.custom is not None}
        self._inputs: dict[int, tuple[int, CustomInput]] = {}  # by answer: that is being written

    def opening(self) -> Iterator[JsonObject]:
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

    def choices(self, index: int, piece: Part) -> Iterator[JsonObject]:
        if isinstance(piece, Logprobs):
            self._held[index] = self._held.get(index, ()) + piece.tokens
        elif isinstance(piece, CallArguments) and index in self._inputs:
            place, custom = self._inputs[index]
            if text := custom.push(piece.text):
                delta = _input_delta(place, text)
                yield self.choice(index, delta, logprobs=self._held.pop(index, ()))
            return
        else:
            yield from self._ended_input(index)
        if isinstance(piece, CallBegun) and piece.name in self._custom:
            self._inputs[index] = piece.index, CustomInput()
            delta = _custom_delta(piece)
            yield self.choice(index, delta, logprobs=self._held.pop(index, ()))
        elif not isinstance(piece, Logprobs | Done):
            yield self.choice(index, _delta(piece), logprobs=self._held.pop(index, ()))
        elif isinstance(piece, Done):
            if index in self._held:
                yield self.choice(index, logprobs=self._held.pop(index))
            yield self.choice(index, end=piece)

    def whole_choice(self, index: int, pieces: Sequence[Piece], end: Done) -> JsonObject:
        text, reasoning = joined(pieces, Text), joined(pieces, Reasoning)
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

    def _ended_input(self, index: int) -> Iterator[JsonObject]:
        """What is left of a custom tool's text whose call has ended."""
        place, custom = self._inputs.pop(index, (0, None))
        rest = "" if custom is None else custom.finish()
        if rest:
            yield self.choice(index, _input_delta(place, rest))

    def _call_object(self, call: ToolCall) -> JsonObject:
        if call.name in self._custom:
            text = CustomInput()
            told = {"name": call.name, "input": text.push(call.arguments) + text.finish()}
            return {"id": call.id, "type": "custom", "custom": told}
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": call.id, "type": "function", "function": function}


def _custom_delta(piece: CallBegun) -> dict[str, Any]:
    call = {"index": piece.index, "id": piece.id, "type": "custom"}
    return {"tool_calls": [{**call, "custom": {"name": piece.name, "input": ""}}]}


def _input_delta(place: int, text: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": place, "custom": {"input": text}}]}


def _delta(piece: Text | Reasoning | CallBegun | CallArguments) -> dict[str, Any]:
    if isinstance(piece, Text):
        return {"content": piece.joined_text}
    if isinstance(piece, Reasoning):
        return {"reasoning_content": piece.joined_text, "reasoning": piece.joined_text}
    if isinstance(piece, CallBegun):
        function: dict[str, str] = {"name": piece.name, "arguments": ""}
        begun_call = {"index": piece.index, "id": piece.id, "type": "function"}
        return {"tool_calls": [{**begun_call, "function": function}]}
    return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


def logprob_content(tokens: Sequence[TokenLogprobs], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Log-probabilities as chat completions have them."""

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
