"""`POST /v1/completions`: texts and token ids as they are, streamed and whole.

`echo` with `logprobs` tells how likely the prompt itself is, which evaluation harnesses ask for.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from lowtide.decode.request import TokenLogprobs
from lowtide.errors import UnsupportedError
from lowtide.params import MAX_SEED, MAX_TOP_LOGPROBS
from lowtide.parsing.pieces import Done, Frame, Logprobs, Piece, Prefilled, Text
from lowtide.serve.errors import body_of, refusal_of
from lowtide.serve.json_body import JsonRoute
from lowtide.serve.many_answers import merged
from lowtide.serve.openai_chat import several
from lowtide.serve.openai_fields import (
    SamplingFields,
    frame_fields,
    new_id,
    progress_fields,
    token_text,
    usage_of,
)
from lowtide.serve.service import Ask, Service
from lowtide.serve.sse import EventStream, WatchedAnswer, event
from lowtide.serve.writers import json_response

PATH = "/v1/completions"

DEFAULT_TOKENS = 16
"""Length of an answer whose request names none, as OpenAI has it."""

MAX_PROMPTS = 64
MAX_PROMPT_TOKENS = 2**22

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# fail_fast: a million values that are none make one error.
Ids = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_TOKENS, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
ManyIds = Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


class CompletionBody(SamplingFields):
    """A request of completions."""

    prompt: str | Texts | Ids | ManyIds
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def prompts(self) -> list[str | Sequence[int]]:
        """One by one."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def asks(self) -> list[Ask]:
        """One for each answer, prompt by prompt. Raises UsageError for what cannot be asked."""
        params = self.sampling(self.max_tokens or DEFAULT_TOKENS, self.logprobs)
        asks: list[Ask] = []
        for index, prompt in enumerate(self.prompts):
            seed = None if params.seed is None else (params.seed + index) % (MAX_SEED + 1)
            ask = Ask(
                prompt=prompt,
                params=replace(params, seed=seed),
                wants_frames=bool(self.stream_options.include_drafts),
                wants_progress=self.return_progress,
            )
            asks += several(ask, self.n)
        return asks


@dataclass(frozen=True)
class Echo:
    """A prompt that is sent before its answers. tokens: None where it has no probability."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None]


def router_of(service: Service) -> APIRouter:
    """The route, over one service."""
    router = APIRouter(route_class=JsonRoute)

    @router.post(PATH)
    async def completions(body: CompletionBody) -> Response:
        """Answers to prompts as they are."""
        service.check_model(body.model)
        asks = body.asks()
        service.check_num_answers(len(asks), "prompt")
        if body.echo and body.logprobs is not None and service.llm.config.is_diffusion:
            raise UnsupportedError("echo with logprobs needs an autoregressive model.")
        pieces = merged([service.answer(ask) for ask in asks])
        respond = partial(
            _streamed if body.stream else _whole, _CompletionReply(service, body, asks)
        )
        return WatchedAnswer(pieces, respond)

    return router


class _CompletionReply:
    """One request's id, its echoes, and what its chunks have in common."""

    def __init__(self, service: Service, body: CompletionBody, asks: Sequence[Ask]) -> None:
        self.body = body
        self.asks = asks
        self.tokenizer = service.llm.tokenizer
        self._service = service
        self._head = {"id": new_id("cmpl-"), "object": "text_completion"}
        self._created, self._start_s = int(time.time()), time.monotonic()
        self._offsets = [0] * len(asks)  # characters sent of each answer

    def object(self, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A chunk, or the whole."""
        head = {**self._head, "created": self._created, "model": self._service.model_name}
        return {**head, "choices": list(choices), **more}

    def choice(
        self,
        index: int,
        text: str,
        tokens: Sequence[TokenLogprobs | None] = (),
        token_ids: Sequence[int] = (),
        end: Done | None = None,
    ) -> dict[str, Any]:
        """What is added to one answer. token_ids: whose the probabilities `tokens` are."""
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        if self.body.logprobs is not None and tokens:
            texts = [token_text(token_id, self.tokenizer) for token_id in token_ids]
            choice["logprobs"] = self._logprobs(index, texts, tokens)
        choice["finish_reason"] = None if end is None else end.reason
        if end is not None and self.body.return_token_ids:
            choice["token_ids"] = list(end.token_ids)
        return choice

    def ping(self) -> bytes:
        """A chunk that adds nothing."""
        return event(self.object([self.choice(0, "")]))

    def _logprobs(
        self, index: int, texts: Sequence[str], tokens: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": list(texts),
            "token_logprobs": [None if token is None else token.logprob for token in tokens],
            "top_logprobs": [None if token is None else self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and the token itself, by text: of two alike the likelier."""
        top = {token_text(one, self.tokenizer): value for one, value in reversed(token.top)}
        top.setdefault(token_text(token.token_id, self.tokenizer), token.logprob)
        return top

    async def echoes(self) -> list[Echo]:
        """One for each prompt; none where none was asked for."""
        if not self.body.echo:
            return []
        return [await self._echo(ask) for ask in self.asks[:: self.body.n]]

    async def _echo(self, ask: Ask) -> Echo:
        token_ids = await self._service.prompt_ids(ask)
        text = ask.prompt if isinstance(ask.prompt, str) else ""
        if not text and self.tokenizer is not None:
            text = self.tokenizer.decode(token_ids)
        logprobs: list[TokenLogprobs | None] = []
        if self.body.logprobs is not None:
            asked = self._service.llm.prompt_logprobs(token_ids, self.body.logprobs)
            logprobs = await self._service.in_time(self._start_s, asked)
        return Echo(text, token_ids, logprobs)


async def _streamed(
    reply: _CompletionReply, pieces: AsyncGenerator[tuple[int, Piece], None]
) -> Response:
    return EventStream(_events(reply, pieces), reply.ping)


async def _events(
    reply: _CompletionReply, pieces: AsyncGenerator[tuple[int, Piece], None]
) -> AsyncGenerator[bytes, None]:
    ends: dict[int, Done] = {}
    try:
        for index, echo in enumerate(await reply.echoes()):
            for sample in range(reply.body.n):
                place = index * reply.body.n + sample
                choice = reply.choice(place, echo.text, echo.logprobs, echo.token_ids)
                yield event(reply.object([choice]))
        async with aclosing(pieces):
            async for index, piece in pieces:
                if isinstance(piece, Done):
                    ends[index] = piece
                chunk = _chunk(reply, index, piece)
                if chunk is not None:
                    yield event(chunk)
    except Exception as error:
        yield event(body_of(refusal_of(error), PATH))
        return
    if reply.body.stream_options.include_usage:
        ordered = [ends[index] for index in sorted(ends)]
        yield event(reply.object([], usage=usage_of(ordered, reply.body.n)))
    yield event("[DONE]")


def _chunk(reply: _CompletionReply, index: int, piece: Piece) -> dict[str, Any] | None:
    """What one piece adds; None for nothing."""
    if isinstance(piece, Text):
        return reply.object([reply.choice(index, piece.text)])
    if isinstance(piece, Logprobs):
        token_ids = [token.token_id for token in piece.tokens]
        return reply.object([reply.choice(index, "", piece.tokens, token_ids)])
    if isinstance(piece, Done):
        return reply.object([reply.choice(index, "", end=piece)])
    if isinstance(piece, Frame):
        return reply.object([reply.choice(index, "")], **frame_fields(piece))
    if isinstance(piece, Prefilled) and reply.body.return_progress:
        return reply.object([reply.choice(index, "")], **progress_fields(piece))
    return None


async def _whole(
    reply: _CompletionReply, pieces: AsyncGenerator[tuple[int, Piece], None]
) -> Response:
    echoes = await reply.echoes()
    answers: list[list[Piece]] = [[] for _ in reply.asks]
    async for index, piece in pieces:
        answers[index].append(piece)
    choices, ends = [], []
    for index, answer in enumerate(answers):
        [end] = [piece for piece in answer if isinstance(piece, Done)]
        ends.append(end)
        text = "".join(piece.text for piece in answer if isinstance(piece, Text))
        tokens: list[TokenLogprobs | None] = []
        token_ids: list[int] = []
        if echoes:
            echo = echoes[index // reply.body.n]
            text, tokens, token_ids = echo.text + text, [*echo.logprobs], [*echo.token_ids]
        new = [token for p in answer if isinstance(p, Logprobs) for token in p.tokens]
        token_ids += [token.token_id for token in new]
        choices.append(reply.choice(index, text, [*tokens, *new], token_ids, end))
    return json_response(reply.object(choices, usage=usage_of(ends, reply.body.n)))
