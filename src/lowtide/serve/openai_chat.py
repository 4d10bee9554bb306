"""`POST /v1/chat/completions`, streamed and whole."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from lowtide.decode.intake import sample_seed
from lowtide.decode.request import TokenLogprobs
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.params import MAX_TOP_LOGPROBS
from lowtide.parsing.pieces import (
    CallArguments,
    CallBegun,
    Done,
    Frame,
    Logprobs,
    Piece,
    Prefilled,
    Reasoning,
    Text,
    joined,
)
from lowtide.serve.conversation import calls_in
from lowtide.serve.errors import Refusal, body_of, refusal_of
from lowtide.serve.grammar_text import Constraint
from lowtide.serve.json_body import JsonRoute
from lowtide.serve.many_answers import merged
from lowtide.serve.openai_fields import (
    MAX_INTEGER,
    SamplingFields,
    frame_fields,
    new_id,
    progress_fields,
    token_text,
    usage_of,
)
from lowtide.serve.openai_messages import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatMessage,
    ToolChoice,
    ToolField,
    chosen_tool,
    conversation_of,
)
from lowtide.serve.service import Ask, Service
from lowtide.serve.sse import EventStream, WatchedAnswer, event
from lowtide.serve.writers import json_response

PATH = "/v1/chat/completions"

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
    Lark."""

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
    reasoning_effort: str | None = Field(None, max_length=32)
    chat_template_kwargs: dict[str, Any] = {}

    def asks(self) -> list[Ask]:
        """One for each answer. Raises Refusal or UsageError for what cannot be asked."""
        conversation = conversation_of(self.messages, self.tools)
        if self.top_logprobs and not self.logprobs:
            raise Refusal("top_logprobs needs logprobs: true.", param="top_logprobs")
        num_top = self.top_logprobs if self.logprobs else None
        ask = Ask(
            conversation,
            params=self.sampling(self.max_completion_tokens or self.max_tokens, num_top),
            template_options=self._template_options(),
            tool_choice=chosen_tool(self.tool_choice, conversation),
            constraint=self._constraint(),
            wants_frames=bool(self.stream_options.include_drafts),
            wants_progress=self.return_progress,
            parallel_calls=self.parallel_tool_calls,
        )
        return several(ask, self.n)

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
        options: dict[str, object] = dict(self.chat_template_kwargs)
        for name in _RESERVED:
            if name in options:
                raise Refusal(
                    f"chat_template_kwargs.{name} is not a request's to set.",
                    param="chat_template_kwargs",
                )
        if self.reasoning_effort is not None:
            options.setdefault("reasoning_effort", self.reasoning_effort)
            if self.reasoning_effort == "none":
                options.setdefault("enable_thinking", False)
        return options


def several(ask: Ask, num_answers: int) -> list[Ask]:
    """So many answers: with a seed they draw as those of the Python API with `n`."""
    seed = ask.params.seed
    if seed is None:
        return [ask] * num_answers
    seeds = [sample_seed(seed, sample) for sample in range(num_answers)]
    return [replace(ask, params=replace(ask.params, seed=each)) for each in seeds]


def router_of(service: Service) -> APIRouter:
    """The route, over one service."""
    router = APIRouter(route_class=JsonRoute)

    @router.post(PATH)
    async def chat_completions(body: ChatBody) -> Response:
        """An answer to a conversation."""
        service.check_model(body.model)
        service.check_num_answers(body.n, "n")
        pieces = merged([service.answer(ask) for ask in body.asks()])
        respond = partial(_streamed if body.stream else _whole, ChatReply(service, body))
        return WatchedAnswer(pieces, respond)

    return router


class ChatReply:
    """One completion's id and what its chunks have in common."""

    def __init__(self, service: Service, body: ChatBody) -> None:
        self.body = body
        self.tokenizer = service.llm.tokenizer
        self._head = {"id": new_id("chatcmpl-"), "created": int(time.time())}
        self._model = service.model_name

    def object(self, kind: str, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A chunk, or the whole."""
        return {
            **self._head,
            "object": kind,
            "model": self._model,
            "system_fingerprint": None,
            "choices": list(choices),
            **more,
        }

    def chunk(
        self,
        index: int,
        delta: dict[str, Any],
        end: Done | None = None,
        logprobs: Sequence[TokenLogprobs] = (),
        **more: Any,
    ) -> bytes:
        """What is added to one answer, which may be nothing."""
        choice: dict[str, Any] = {"index": index, "delta": delta}
        choice["logprobs"] = logprob_content(logprobs, self.tokenizer) if logprobs else None
        choice["finish_reason"] = None if end is None else end.reason
        if end is not None and self.body.return_token_ids:
            choice["token_ids"] = list(end.token_ids)
        return event(self.object("chat.completion.chunk", [choice], **more))


async def _streamed(reply: ChatReply, pieces: AsyncGenerator[tuple[int, Piece], None]) -> Response:
    return EventStream(_events(reply, pieces), partial(reply.chunk, 0, {}))


async def _events(
    reply: ChatReply, pieces: AsyncGenerator[tuple[int, Piece], None]
) -> AsyncGenerator[bytes, None]:
    ends: list[Done] = []
    held: dict[int, tuple[TokenLogprobs, ...]] = {}
    try:
        async with aclosing(pieces):
            for index in range(reply.body.n):
                yield reply.chunk(index, {"role": "assistant", "content": ""})
            async for index, piece in pieces:
                if isinstance(piece, Logprobs):
                    held[index] = held.get(index, ()) + piece.tokens
                    continue
                if isinstance(piece, Done):
                    ends.append(piece)
                for part in _chunks(reply, index, piece, held):
                    yield part
    except Exception as error:
        yield event(body_of(refusal_of(error), PATH))
        return
    if reply.body.stream_options.include_usage:
        usage = usage_of(ends, reply.body.n)
        yield event(reply.object("chat.completion.chunk", [], usage=usage))
    yield event("[DONE]")


def _chunks(
    reply: ChatReply, index: int, piece: Piece, held: dict[int, tuple[TokenLogprobs, ...]]
) -> Iterator[bytes]:
    """The chunks of one piece. held: log-probabilities that go with the next words."""
    if isinstance(piece, Prefilled):
        if reply.body.return_progress:
            yield reply.chunk(index, {}, **progress_fields(piece))
    elif isinstance(piece, Frame):
        yield reply.chunk(index, {}, **frame_fields(piece))
    elif isinstance(piece, Done):
        if index in held:
            yield reply.chunk(index, {}, logprobs=held.pop(index))
        yield reply.chunk(index, {}, piece)
    elif not isinstance(piece, Logprobs):
        yield reply.chunk(index, _delta(piece), logprobs=held.pop(index, ()))


def _delta(piece: Text | Reasoning | CallBegun | CallArguments) -> dict[str, Any]:
    if isinstance(piece, Text):
        return {"content": piece.text}
    if isinstance(piece, Reasoning):
        return {"reasoning_content": piece.text, "reasoning": piece.text}
    if isinstance(piece, CallBegun):
        function: dict[str, str] = {"name": piece.name, "arguments": ""}
        begun_call = {"index": piece.index, "id": piece.id, "type": "function"}
        return {"tool_calls": [{**begun_call, "function": function}]}
    return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


async def _whole(reply: ChatReply, pieces: AsyncGenerator[tuple[int, Piece], None]) -> Response:
    answers: list[list[Piece]] = [[] for _ in range(reply.body.n)]
    async for index, piece in pieces:
        answers[index].append(piece)
    ends = [piece for answer in answers for piece in answer if isinstance(piece, Done)]
    choices = [_choice(reply, index, answer) for index, answer in enumerate(answers)]
    usage = usage_of(ends, reply.body.n)
    return json_response(reply.object("chat.completion", choices, usage=usage))


def _choice(reply: ChatReply, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
    [end] = [piece for piece in pieces if isinstance(piece, Done)]
    text, reasoning = joined(pieces, Text), joined(pieces, Reasoning)
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls_in(pieces)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
    if reasoning:
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if calls:
        message["tool_calls"] = calls
    tokens = [token for p in pieces if isinstance(p, Logprobs) for token in p.tokens]
    choice: dict[str, Any] = {"index": index, "message": message, "finish_reason": end.reason}
    choice["logprobs"] = logprob_content(tokens, reply.tokenizer) if reply.body.logprobs else None
    if reply.body.return_token_ids:
        choice["token_ids"] = list(end.token_ids)
    return choice


def logprob_content(tokens: Sequence[TokenLogprobs], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Log-probabilities as chat completions have them."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = token_text(token_id, tokenizer)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        {
            **entry(token.token_id, token.logprob),
            "top_logprobs": [entry(token_id, value) for token_id, value in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}
